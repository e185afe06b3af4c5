package cube;

import java.io.FileInputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.security.Provider;
import java.security.SecureRandomSpi;
import java.security.Security;

/**
 * The generator behind every {@code new SecureRandom()}, and therefore behind UUIDs, keys and names of temporary files.
 * It reads every byte from the kernel and has no state that a snapshot could copy into its clones.
 */
public final class KernelRandom extends Provider {
    private static final String ALGORITHM = "Kernel";

    private KernelRandom() {
        super("Cube", "1", "random bytes of the kernel");
        putService(new Service(this, "SecureRandom", ALGORITHM, Generator.class.getName(), null, null));
    }

    /** Makes it the default. Must be called before the first use of a generator. */
    static void install() {
        Provider provider = new KernelRandom();
        Security.insertProviderAt(provider, 1);
        Security.setProperty("securerandom.strongAlgorithms", ALGORITHM + ":" + provider.getName());
    }

    /** Instantiated by the JDK. */
    public static final class Generator extends SecureRandomSpi {
        private static final FileInputStream SOURCE = open();

        @Override
        protected void engineNextBytes(byte[] bytes) {
            try {
                if (SOURCE.readNBytes(bytes, 0, bytes.length) < bytes.length) throw new IOException("/dev/urandom ends");
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        @Override
        protected byte[] engineGenerateSeed(int count) {
            byte[] seed = new byte[count];
            engineNextBytes(seed);
            return seed;
        }

        /** Seeds are ignored. */
        @Override
        protected void engineSetSeed(byte[] seed) {}

        private static FileInputStream open() {
            try {
                return new FileInputStream("/dev/urandom");
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }
}
