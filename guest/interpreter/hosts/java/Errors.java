package cube;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.stream.Collectors;
import jdk.jshell.DeclarationSnippet;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.Snippet;
import jdk.jshell.Snippet.Status;
import jdk.jshell.SnippetEvent;
import jdk.jshell.UnresolvedReferenceException;

/** Converts errors of snippets to events. */
final class Errors {
    /** Frames in a trace: an endless recursion has a thousand. */
    private static final int MAX_FRAMES = 50;

    private final JShell shell;

    Errors(JShell shell) {
        this.shell = shell;
    }

    /** The error of a snippet, which begins at an offset of the cell's code; null if it has none. */
    String of(SnippetEvent event, String code, int offset) {
        if (event.status() == Status.REJECTED) return rejected(event.snippet(), code, offset);
        var thrown = event.exception();
        if (thrown instanceof UnresolvedReferenceException unresolved) {
            String what = missing(unresolved.getSnippet());
            return Results.error("UnresolvedReferenceException", what, "UnresolvedReferenceException: " + what + frames(thrown));
        }
        if (thrown instanceof EvalException exception) {
            String message = exception.getMessage() == null ? "" : exception.getMessage();
            return Results.error(exception.getExceptionClassName(), message, trace(exception));
        }
        return null;
    }

    /** The error of a value whose {@code toString} throws. */
    static String ofValue(Throwable thrown) {
        String message = thrown.getMessage() == null ? "" : thrown.getMessage();
        return Results.error(thrown.getClass().getName(), message, thrown + frames(thrown));
    }

    /** The warning about a declaration with unresolved names, which JShell accepts. */
    void noteWhatIsMissing(Snippet snippet) {
        Status status = shell.status(snippet);
        if (status == Status.RECOVERABLE_DEFINED || status == Status.RECOVERABLE_NOT_DEFINED) {
            System.err.println(missing((DeclarationSnippet) snippet));
            System.err.flush();
        }
    }

    private String missing(DeclarationSnippet snippet) {
        String what = shell.unresolvedDependencies(snippet).collect(Collectors.joining(", "));
        return snippet.name() + " is declared, but cannot be used until there is: " + what;
    }

    private String rejected(Snippet snippet, String code, int offset) {
        List<Diag> errors = shell.diagnostics(snippet).filter(Diag::isError).toList();
        String trace = errors.stream().map(error -> place(error, code, offset)).collect(Collectors.joining("\n"));
        String value = errors.isEmpty() ? "the code was not accepted" : message(errors.get(0)).lines().findFirst().orElse("");
        return Results.error("CompilationException", value, trace);
    }

    /** Formats an error as javac does: message, line, and a marker. */
    private static String place(Diag error, String code, int offset) {
        int at = (int) Math.min(offset + Math.max(error.getPosition(), 0), code.length());
        int start = code.lastIndexOf('\n', at - 1) + 1;
        int end = code.indexOf('\n', at);
        long line = 1 + code.substring(0, at).chars().filter(c -> c == '\n').count();
        String text = code.substring(start, end < 0 ? code.length() : end);
        return "cell:" + line + ": error: " + message(error) + "\n" + text + "\n" + " ".repeat(at - start) + "^";
    }

    private static String message(Diag error) {
        return error.getMessage(Locale.ENGLISH);
    }

    private static String trace(EvalException exception) {
        String message = exception.getMessage() == null ? "" : ": " + exception.getMessage();
        String cause = exception.getCause() instanceof EvalException inner ? "\nCaused by: " + trace(inner) : "";
        return exception.getExceptionClassName() + message + frames(exception) + cause;
    }

    /** The frames of snippets, without class names, up to the first frame of this program. */
    private static String frames(Throwable thrown) {
        var lines = new ArrayList<String>();
        for (StackTraceElement frame : thrown.getStackTrace()) {
            if (frame.getClassName().startsWith("cube.")) break;
            String text = frame.toString();
            lines.add("\n\tat " + (text.startsWith(".") ? text.substring(1) : text));
        }
        int shown = Math.min(lines.size(), MAX_FRAMES);
        String more = shown < lines.size() ? "\n\t... " + (lines.size() - shown) + " more" : "";
        return String.join("", lines.subList(0, shown)) + more;
    }
}
