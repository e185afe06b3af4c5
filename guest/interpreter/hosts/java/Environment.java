package cube;

import java.lang.reflect.Field;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;

/**
 * Variables of sandbox and cell. Each is a system property, as clients of this contract expect, and a variable of
 * the environment, for {@code System.getenv} and {@code ProcessBuilder.environment}: the JDK holds that in a map that
 * it does not let change, so what changes is the map behind it. Children that are given no environment have that of
 * the process, which no Java can change.
 */
final class Environment {
    private final Map<String, String> environment = behind(System.getenv());
    private final Properties properties = System.getProperties();
    private Runnable undoBase = () -> {};

    /** Makes these the sandbox's variables; those that were before are gone. */
    void setBase(Map<String, String> variables) {
        undoBase.run();
        undoBase = set(variables);
    }

    /** Sets variables; what undoes it. */
    Runnable set(Map<String, String> variables) {
        Map<String, String> inEnvironment = new LinkedHashMap<>();
        Map<String, String> inProperties = new LinkedHashMap<>();
        variables.forEach((name, value) -> {
            inEnvironment.put(name, environment.put(name, value));
            inProperties.put(name, (String) properties.setProperty(name, value));
        });
        return () -> {
            inEnvironment.forEach((name, before) -> restore(environment, name, before));
            inProperties.forEach((name, before) -> restore(properties, name, before));
        };
    }

    private static void restore(Map<? super String, ? super String> variables, String name, String before) {
        if (before == null) variables.remove(name);
        else variables.put(name, before);
    }

    @SuppressWarnings("unchecked")
    private static Map<String, String> behind(Map<String, String> unmodifiable) {
        try {
            Field map = Collections.unmodifiableMap(Map.of()).getClass().getDeclaredField("m");
            map.setAccessible(true);
            return (Map<String, String>) map.get(unmodifiable);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this JDK keeps its environment otherwise", error);
        }
    }
}
