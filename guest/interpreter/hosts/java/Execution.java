package cube;

import java.lang.reflect.Method;
import java.util.concurrent.Callable;
import jdk.jshell.execution.DirectExecutionControl;

/**
 * Runs what JShell has compiled: in this process, each call on a thread of its own, which an interrupt can stop.
 *
 * <p>The first interrupt of a cell interrupts its thread; those after it stop the thread wherever it is. Where the JDK
 * no longer offers that (from 20 on), a cell that never waits goes on until the server replaces the host.
 */
final class Execution extends DirectExecutionControl {
    /** The JVM delivers a signal late: one for a cell that has just ended would count for the next. Whom it was meant
     * for is interrupted again half a second later. */
    private static final long DEAF_NANOS = 200_000_000;

    private Thread thread;
    private long begun;
    private int interrupts;
    private Object value;

    /** A cell begins: interrupts of earlier ones do not count. */
    synchronized void begin() {
        interrupts = 0;
        begun = System.nanoTime();
        value = null;
    }

    synchronized boolean isInterrupted() {
        return interrupts > 0;
    }

    /** What the last snippet evaluated to; null for none. */
    Object value() {
        return value;
    }

    @Override
    protected String invoke(Method method) throws Exception {
        value = call(() -> method.invoke(null));
        // JShell would have the text of every value.
        return "";
    }

    /** Runs a user's code to its end. */
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
        if (System.nanoTime() - begun < DEAF_NANOS) return;
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
                // A cell cannot have this thread give up waiting for it.
            }
        }
    }

    /** How a call ended. */
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
