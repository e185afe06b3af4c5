package cube;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import jdk.jshell.JShell;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.SourceCodeAnalysis.Completeness;
import jdk.jshell.spi.ExecutionControl;
import jdk.jshell.spi.ExecutionControlProvider;
import jdk.jshell.spi.ExecutionEnv;

/** Runs cells: one snippet after another, until one fails. The value of the last one is the value of the cell. */
final class Cells {
    /** What the JDK's own shell imports, and {@code display}. */
    private static final String[] IMPORTS = {
        "java.io.*", "java.math.*", "java.net.*", "java.nio.file.*", "java.util.*", "java.util.concurrent.*",
        "java.util.function.*", "java.util.prefs.*", "java.util.regex.*", "java.util.stream.*", "static cube.Host.display",
    };

    private final Execution execution;
    private final JShell shell;
    private final SourceCodeAnalysis analysis;
    private final Errors errors;

    Cells(Execution execution) {
        this.execution = execution;
        shell = JShell.builder().executionEngine(new InProcess(execution), Map.of()).build();
        analysis = shell.sourceCodeAnalysis();
        errors = new Errors(shell);
        for (String name : IMPORTS) shell.eval("import " + name + ";");
    }

    /** The event that ends the cell: an error or its value; null if it has neither. */
    String run(String code) {
        execution.begin();
        List<Snippet> snippets = new ArrayList<>();
        String rest = code;
        while (!rest.isBlank() && !execution.isInterrupted()) {
            var part = analysis.analyzeCompletion(rest);
            if (part.completeness() == Completeness.EMPTY) break;
            // Incomplete code is compiled as well: the compiler reports the error.
            boolean isWhole = part.completeness().isComplete();
            SnippetEvent event = evaluate(isWhole ? part.source() : rest);
            String error = errors.of(event, code, code.length() - rest.length());
            if (error != null) return error;
            snippets.add(event.snippet());
            rest = isWhole ? part.remaining() : "";
        }
        snippets.forEach(errors::noteWhatIsMissing);
        return snippets.isEmpty() ? null : value(snippets.get(snippets.size() - 1));
    }

    /** The event of the snippet itself; events of other snippets may accompany it. */
    private SnippetEvent evaluate(String source) {
        for (SnippetEvent event : shell.eval(source)) {
            if (event.causeSnippet() == null) return event;
        }
        throw new IllegalStateException("a snippet without an event");
    }

    /** The value of an expression; null for declarations and assignments, whose values are not shown. */
    private String value(Snippet last) {
        Object value = execution.value();
        boolean isShown = switch (last.subKind()) {
            case VAR_VALUE_SUBKIND, TEMP_VAR_EXPRESSION_SUBKIND, OTHER_EXPRESSION_SUBKIND -> value != null;
            default -> false;
        };
        if (!isShown) return null;
        try {
            return execution.call(() -> Results.event(value, true));
        } catch (ExecutionControl.StoppedException interrupted) {
            return null;
        } catch (Throwable thrown) {
            return Errors.ofValue(thrown);
        }
    }

    /** Makes JShell run its snippets in this process. */
    private record InProcess(Execution execution) implements ExecutionControlProvider {
        @Override
        public String name() {
            return "cube";
        }

        @Override
        public ExecutionControl generate(ExecutionEnv environment, Map<String, String> parameters) {
            return execution;
        }
    }
}
