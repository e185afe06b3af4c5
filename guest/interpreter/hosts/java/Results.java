package cube;

import java.awt.image.RenderedImage;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.Base64;
import javax.imageio.ImageIO;
import jdk.jshell.execution.DirectExecutionControl;

/** Converts values to result events. */
final class Results {
    /** Limit below the 64 MiB of a line on the control socket. */
    private static final int MAX_TEXT = 16 << 20;

    private Results() {}

    /** Calls the value's {@code toString}, which may be user code. */
    static String event(Object value, boolean main) {
        String image = value instanceof RenderedImage shown ? ",\"png\":\"" + png(shown) + '"' : "";
        return "{\"type\":\"result\",\"text\":" + Control.quote(text(value)) + image + ",\"is_main_result\":" + main + "}";
    }

    static String error(String name, String value, String traceback) {
        return "{\"type\":\"error\",\"name\":" + Control.quote(name) + ",\"value\":" + Control.quote(value)
            + ",\"traceback\":" + Control.quote(traceback) + "}";
    }

    private static String text(Object value) {
        boolean isArray = value != null && value.getClass().isArray();
        String text = isArray ? Values.of(value) : String.valueOf(value);
        return text.substring(0, Math.min(text.length(), MAX_TEXT));
    }

    private static String png(RenderedImage image) {
        var bytes = new ByteArrayOutputStream();
        try {
            ImageIO.write(image, "png", bytes);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        return Base64.getEncoder().encodeToString(bytes.toByteArray());
    }

    /** Access to JShell's formatting of arrays, which is protected. */
    private static final class Values extends DirectExecutionControl {
        static String of(Object value) {
            return valueString(value);
        }
    }
}
