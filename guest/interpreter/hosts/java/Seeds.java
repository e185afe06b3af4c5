package cube;

import java.lang.reflect.Field;
import java.security.SecureRandom;
import java.util.List;
import java.util.Random;
import java.util.concurrent.atomic.AtomicLong;

/**
 * New random state in a process whose memory was copied. Clones of a snapshot wake up with the same generators; the
 * kernel's is another one in each clone by then, and from it the others are seeded ({@link KernelRandom} needs no seed).
 * Those of the JDK keep their state in private fields, which the manifest opens to this program.
 */
final class Seeds {
    /** Fields from which generators that are made later are seeded. */
    private static final List<String> SOURCES = List.of(
        "java.util.Random.seedUniquifier",
        "java.util.SplittableRandom.defaultGen",
        "java.util.concurrent.ThreadLocalRandom.seeder");
    /** The same in the package of the newer algorithms, which is another one in later JDKs. */
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
    /** Generators that the JDK's own functions share: {@code Math.random}, {@code Collections.shuffle}. */
    private static final List<String> SHARED =
        List.of("java.lang.Math$RandomNumberGeneratorHolder.randomNumberGenerator", "java.util.Collections.r");

    private Seeds() {}

    static void reseed() throws ReflectiveOperationException {
        var kernel = new SecureRandom();
        for (String name : SOURCES) ((AtomicLong) field(name).get(null)).set(kernel.nextLong());
        for (String name : NEWER_SOURCES) ((AtomicLong) field(PACKAGE + name).get(null)).set(kernel.nextLong());
        for (String name : SHARED) {
            // Null until it is used first.
            if (field(name).get(null) instanceof Random shared) shared.setSeed(kernel.nextLong());
        }
        reseedThreads(kernel);
    }

    /** Threads that live on have a generator each. */
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
