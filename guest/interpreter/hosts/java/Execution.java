package cube;

import java.lang.reflect.Method;
import java.util.concurrent.Callable;
import jdk.jshell.execution.DirectExecutionControl;

/**
 * Runs the code that JShell has compiled: in this process, each call on a new thread, which an interrupt can stop.
 *
 * <p>The first interrupt of a cell interrupts its thread; further ones stop the thread anywhere. JDK 20 and later do
 * not support that; there, a cell that never waits runs until the server replaces the host.
 */
final class Execution extends DirectExecutionControl {
    /** How long a cell ignores interrupts after its start: the JVM delivers signals late, so one may be meant for the
     * previous cell. The server repeats an interrupt after half a second. */
    private static final long IGNORE_NANOS = 200_000_000;

    private Thread thread;
    private long begun;
    private int interrupts;
    private Object value;

    /** A cell begins. Interrupts of earlier cells are ignored. */
    synchronized void begin() {
        interrupts = 0;
        begun = System.nanoTime();
        value = null;
    }

    synchronized boolean isInterrupted() {
        return interrupts > 0;
    }

    /** The value of the last snippet; null if it has none. */
    Object value() {
        return value;
    }

    @Override
    protected String invoke(Method method) throws Exception {
        value = call(() -> method.invoke(null));
        // Avoids that JShell formats every value.
        return "";
    }

    /** Runs user code until it returns or throws. */
    <T> T call(Callable<T> code) throws Exception {
        var outcome = new Outcome<T>(code);
        start(new Thread(outcome, "cell"));
        join(thread);
        synchronized (this) {
            thread = null;
            if (interrupts > 0) throw new StoppedException();
        }
        if (outcome.thrown instanceof Error error) throw error;
        if (outcome.thrown != null) throw (Exception) outcome.thrown;
        return outcome.value;
    }

    @SuppressWarnings({"deprecation", "removal"})
    synchronized void interrupt() {
        if (System.nanoTime() - begun < IGNORE_NANOS) return;
        interrupts++;
        if (thread == null) return;
        if (interrupts == 1) {
            thread.interrupt();
            return;
        }
        try {
            thread.stop();
        } catch (UnsupportedOperationException error) {
            thread.interrupt();
        }
    }

    private synchronized void start(Thread cell) throws StoppedException {
        if (interrupts > 0) throw new StoppedException();
        thread = cell;
        thread.start();
    }

    private static void join(Thread thread) {
        while (thread.isAlive()) {
            try {
                thread.join();
            } catch (InterruptedException error) {
                // User code must not end the wait by interrupting this thread.
            }
        }
    }

    /** The result of a call. */
    private static final class Outcome<T> implements Runnable {
        private final Callable<T> code;
        private T value;
        private Throwable thrown;

        Outcome(Callable<T> code) {
            this.code = code;
        }

        @Override
        public void run() {
            try {
                value = code.call();
            } catch (Throwable error) {
                thrown = error;
            }
        }
    }
}
