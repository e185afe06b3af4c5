package cube;

import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;

/** The host's end of the control socket: zero-terminated fields in, lines of JSON out. */
final class Control {
    private final InputStream in;
    private final OutputStream out;

    private Control(FileDescriptor descriptor) {
        in = new BufferedInputStream(new FileInputStream(descriptor));
        out = new FileOutputStream(descriptor);
    }

    /** Opens an inherited descriptor, by its number: Java has no other access to it. */
    static Control open(int number) throws ReflectiveOperationException {
        var make = FileDescriptor.class.getDeclaredConstructor(int.class);
        make.setAccessible(true);
        return new Control(make.newInstance(number));
    }

    /** The next field, without its end; null if the server has closed the socket. */
    String field() throws IOException {
        var bytes = new ByteArrayOutputStream();
        for (int next = in.read(); next != 0; next = in.read()) {
            if (next < 0) return null;
            bytes.write(next);
        }
        return bytes.toString(StandardCharsets.UTF_8);
    }

    /** Sends a line. */
    synchronized void say(String line) {
        try {
            out.write((line + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** The text as a JSON string. */
    static String quote(String text) {
        var quoted = new StringBuilder(text.length() + 2).append('"');
        for (int i = 0; i < text.length(); i++) {
            char c = text.charAt(i);
            switch (c) {
                case '"', '\\' -> quoted.append('\\').append(c);
                case '\n' -> quoted.append("\\n");
                default -> {
                    if (c < ' ') quoted.append(String.format("\\u%04x", (int) c));
                    else quoted.append(c);
                }
            }
        }
        return quoted.append('"').toString();
    }
}
