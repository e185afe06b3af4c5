package cube;

import java.lang.reflect.Field;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;

/**
 * Variables of sandbox and cell. Each becomes a system property, which clients expect, and an environment variable for
 * {@code System.getenv} and {@code ProcessBuilder.environment}. The JDK holds the environment in an unmodifiable map,
 * so the map behind that view is changed. Children without an explicit environment inherit that of the process, which
 * Java code cannot change.
 */
final class Environment {
    private final Map<String, String> environment = behind(System.getenv());
    private final Properties properties = System.getProperties();
    private Runnable undoBase = () -> {};

    /** Replaces the sandbox's variables. */
    void setBase(Map<String, String> variables) {
        undoBase.run();
        undoBase = set(variables);
    }

    /** Sets variables. Returns an action that restores their previous values. */
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
            throw new IllegalStateException("this JDK stores its environment in an unknown way", error);
        }
    }
}
