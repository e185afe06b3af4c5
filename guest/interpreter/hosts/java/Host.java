package cube;

import java.io.InputStream;
import java.util.LinkedHashMap;
import java.util.Map;
import sun.misc.Signal;

/**
 * Host of Java contexts: reads cells from descriptor 3, a socket, and responds there. The server's {@code message}
 * module describes the messages. Requests are fields, because the JDK has no JSON parser.
 *
 * <p>Cells are compiled by the JDK's own JShell and run in this process.
 */
public final class Host {
    private static Control control;

    private final Execution execution = new Execution();
    private final Environment environment = new Environment();
    private final Cells cells = new Cells(execution);

    private Host() {}

    /** With {@code --train} the host only runs typical first cells, to record the classes for the CDS archive. */
    public static void main(String[] arguments) throws Exception {
        control = Control.open(3);
        System.setIn(InputStream.nullInputStream());
        KernelRandom.install();
        Host host = new Host();
        Signal.handle(new Signal("INT"), signal -> host.execution.interrupt());
        if (arguments.length > 0 && arguments[0].equals("--train")) {
            host.train();
        } else {
            control.say("{\"ready\":true}");
            while (host.serve()) {}
        }
        System.exit(0);
    }

    /** Displays a value; called by cells. */
    public static void display(Object value) {
        control.say(Results.event(value, false));
    }

    /** Runs the next cell; false if the server has closed the socket. */
    private boolean serve() throws Exception {
        String seed = control.field();
        if (seed == null) return false;
        if (!seed.isEmpty()) Seeds.reseed();
        String base = control.field();
        if (!base.isEmpty()) environment.setBase(variables(Integer.parseInt(base)));
        Runnable undo = environment.set(variables(Integer.parseInt(control.field())));
        cell(control.field());
        undo.run();
        control.say("{\"done\":true}");
        return true;
    }

    private Map<String, String> variables(int count) throws Exception {
        Map<String, String> variables = new LinkedHashMap<>();
        for (int i = 0; i < count; i++) {
            String[] pair = control.field().split("=", 2);
            variables.put(pair[0], pair[1]);
        }
        return variables;
    }

    private void cell(String code) {
        String event = cells.run(code);
        System.out.flush();
        System.err.flush();
        if (event != null) control.say(event);
    }

    private void train() throws Exception {
        Seeds.reseed();
        String[] first = {
            "int x = 6; x * 7",
            "String greet(String name) {\n  return \"Hello, \" + name;\n}\nSystem.out.println(greet(\"you\"));",
            "record Point(int x, int y) {}\nclass Named {\n  String name;\n}\nnew Point(1, 2)",
            "import java.util.stream.*;\nvar squares = IntStream.range(0, 5).map(i -> i * i).boxed().toList();\nsquares",
            "for (var entry : new TreeMap<>(Map.of(\"a\", 1)).entrySet()) {\n  System.out.printf(\"%s%n\", entry);\n}",
            "int[] numbers = {1, 2};\nnumbers[5]",
            "undefined",
        };
        for (String code : first) cell(code);
    }
}
