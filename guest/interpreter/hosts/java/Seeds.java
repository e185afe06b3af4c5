package cube;

import java.lang.reflect.Field;
import java.security.SecureRandom;
import java.util.List;
import java.util.Random;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Reseeds generators in a cloned process. Clones of a snapshot resume with equal generators, except that of the kernel,
 * from which the others are seeded ({@link KernelRandom} needs no seed). Generators of the JDK have their state in
 * private fields, which the manifest opens to this program.
 */
final class Seeds {
    /** Fields from which later generators take their seeds. */
    private static final List<String> SOURCES = List.of(
        "java.util.Random.seedUniquifier",
        "java.util.SplittableRandom.defaultGen",
        "java.util.concurrent.ThreadLocalRandom.seeder");
    /** Such fields in the package of the newer algorithms, whose name depends on the JDK. */
    private static final List<String> NEWER_SOURCES = List.of(
        "L128X1024MixRandom.defaultGen",
        "L128X128MixRandom.defaultGen",
        "L128X256MixRandom.defaultGen",
        "L32X64MixRandom.defaultGen",
        "L64X1024MixRandom.defaultGen",
        "L64X128MixRandom.defaultGen",
        "L64X128StarStarRandom.defaultGen",
        "L64X256MixRandom.defaultGen",
        "Xoroshiro128PlusPlus.defaultGen",
        "Xoshiro256PlusPlus.DEFAULT_GEN");
    private static final String PACKAGE =
        ModuleLayer.boot().findModule("jdk.random").isPresent() ? "jdk.random." : "jdk.internal.random.";
    /** Generators that functions of the JDK share: {@code Math.random}, {@code Collections.shuffle}. */
    private static final List<String> SHARED =
        List.of("java.lang.Math$RandomNumberGeneratorHolder.randomNumberGenerator", "java.util.Collections.r");

    private Seeds() {}

    static void reseed() throws ReflectiveOperationException {
        var kernel = new SecureRandom();
        for (String name : SOURCES) ((AtomicLong) field(name).get(null)).set(kernel.nextLong());
        for (String name : NEWER_SOURCES) ((AtomicLong) field(PACKAGE + name).get(null)).set(kernel.nextLong());
        for (String name : SHARED) {
            // Null until its first use.
            if (field(name).get(null) instanceof Random shared) shared.setSeed(kernel.nextLong());
        }
        reseedThreads(kernel);
    }

    /** Each running thread has its own generator. */
    private static void reseedThreads(SecureRandom kernel) throws ReflectiveOperationException {
        Field seed = open(Thread.class, "threadLocalRandomSeed");
        for (Thread thread : Thread.getAllStackTraces().keySet()) seed.setLong(thread, kernel.nextLong());
    }

    private static Field field(String name) throws ReflectiveOperationException {
        int dot = name.lastIndexOf('.');
        return open(Class.forName(name.substring(0, dot)), name.substring(dot + 1));
    }

    private static Field open(Class<?> owner, String name) throws ReflectiveOperationException {
        Field field = owner.getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }
}
