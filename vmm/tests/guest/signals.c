// Synchronous signals with their addresses, the alternate stack, masks, queues, restarts.
#include "check.h"
#include <ucontext.h>

static sigjmp_buf back;
static volatile siginfo_t seen;
static volatile uintptr_t seen_rip;
static volatile int on_stack_ok;
static char alternate[64 << 10];

static void note(int signo, siginfo_t *info, void *context) {
    (void)signo;
    seen.si_signo = info->si_signo;
    seen.si_code = info->si_code;
    seen.si_addr = info->si_addr;
    seen_rip = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    char here;
    on_stack_ok = &here >= alternate && &here < alternate + sizeof alternate;
    siglongjmp(back, 1);
}

static void catch(int signo, int flags) {
    struct sigaction act = {.sa_sigaction = note, .sa_flags = SA_SIGINFO | flags};
    CHECK(sigaction(signo, &act, NULL) == 0);
}

#define EXPECT(signal, code, address, act)                                                           \
    do {                                                                                             \
        seen.si_signo = 0;                                                                           \
        if (sigsetjmp(back, 1) == 0) {                                                               \
            act;                                                                                     \
        }                                                                                            \
        CHECK(seen.si_signo == (signal), "signal %d", seen.si_signo);                                \
        CHECK(seen.si_code == (code), "code %d", seen.si_code);                                      \
        CHECK((uintptr_t)seen.si_addr == (uintptr_t)(address), "address %p", seen.si_addr);          \
    } while (0)

static int recurse(int n) {
    volatile char pad[4096];
    pad[0] = n;
    return n == 0 ? pad[0] : recurse(n + 1) + pad[0];
}

static volatile int count;
static void bump(int signo) {
    (void)signo;
    count++;
}

static volatile int values[64];
static volatile int queued;
static void take(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    values[queued++ & 63] = info->si_value.sival_int;
}

// A handler that changes registers of the interrupted code.
static void skip_ud2(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)info;
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    regs[REG_RIP] += 2;
    regs[REG_RAX] = 0x1122334455667788;
}

int main(int argc, char **argv) {
    (void)argv;
    char *p = map(16 * PAGE, MAP_PRIVATE);
    for (int i = 0; i < 20; i++) {
        catch(SIGSEGV, 0);
        EXPECT(SIGSEGV, SEGV_MAPERR, 0x123, *(volatile char *)0x123 = 1);
        EXPECT(SIGSEGV, SEGV_MAPERR, 0x10, (void)*(volatile char *)0x10);
        char *hole = mmap(NULL, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT(SIGSEGV, SEGV_ACCERR, hole + PAGE + 77 + i, hole[PAGE + 77 + i] = 1);
        // Across a page boundary, the address is in the page that faults.
        CHECK(mprotect(hole, PAGE, PROT_READ | PROT_WRITE) == 0);
        EXPECT(SIGSEGV, SEGV_ACCERR, hole + PAGE, *(volatile uint64_t *)(hole + PAGE - 4) = 1);
        munmap(hole, 8 * PAGE);
        CHECK(mprotect(p, PAGE, PROT_READ) == 0);
        EXPECT(SIGSEGV, SEGV_ACCERR, p + 5, p[5] = 1);
        CHECK(mprotect(p, PAGE, PROT_READ | PROT_WRITE) == 0);
        p[5] = 1;
        // Not executable.
        EXPECT(SIGSEGV, SEGV_ACCERR, p + PAGE, (*(void (**)(void))&(char *){p + PAGE})());
        // String instructions, pushes and vector stores also report the faulting address.
        CHECK(mprotect(p + 8 * PAGE, PAGE, PROT_NONE) == 0);
        EXPECT(SIGSEGV, SEGV_ACCERR, p + 8 * PAGE,
               asm volatile("rep stosb" ::"D"(p + 8 * PAGE - 100), "c"(200), "a"(0) : "memory"));
        EXPECT(SIGSEGV, SEGV_ACCERR, p + 8 * PAGE + 16,
               asm volatile("movups %%xmm0, (%0)" ::"r"(p + 8 * PAGE + 16) : "memory"));
        // Non-canonical addresses are reported as address 0.
        EXPECT(SIGSEGV, SI_KERNEL, 0, *(volatile char *)0x8000000000000000 = 1);
        // An unmapped address in the kernel's half.
        EXPECT(SIGSEGV, SEGV_MAPERR, 0xffffb00000000000, *(volatile char *)0xffffb00000000000 = 1);

        catch(SIGFPE, 0);
        seen.si_addr = NULL;
        if (sigsetjmp(back, 1) == 0)
            asm volatile("idivl %0" ::"r"(0), "a"(1), "d"(0));
        CHECK(seen.si_signo == SIGFPE && seen.si_code == FPE_INTDIV, "code %d", seen.si_code);
        CHECK((uintptr_t)seen.si_addr == seen_rip);

        catch(SIGILL, 0);
        if (sigsetjmp(back, 1) == 0)
            asm volatile("ud2");
        CHECK(seen.si_signo == SIGILL && seen.si_code == ILL_ILLOPN, "code %d", seen.si_code);
        CHECK((uintptr_t)seen.si_addr == seen_rip);

        catch(SIGTRAP, 0);
        if (sigsetjmp(back, 1) == 0)
            asm volatile("int3");
        CHECK(seen.si_signo == SIGTRAP && seen.si_code == SI_KERNEL, "code %d", seen.si_code);
        // A privileged instruction.
        EXPECT(SIGSEGV, SI_KERNEL, 0, asm volatile("hlt"));
        // A selector of the local descriptor table, which is empty.
        EXPECT(SIGSEGV, SI_KERNEL, 0, asm volatile("mov %0, %%es" ::"r"(0x7fbf)));

        catch(SIGBUS, 0);
        char name[] = "/tmp/signalsXXXXXX";
        int fd = mkstemp(name);
        unlink(name);
        CHECK(ftruncate(fd, PAGE) == 0);
        char *file = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        file[0] = 1;
        EXPECT(SIGBUS, BUS_ADRERR, file + PAGE + 3, file[PAGE + 3] = 1);
        munmap(file, 2 * PAGE);
        close(fd);
    }

    // A stack overflow is handled on the alternate stack.
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    CHECK(sigaltstack(&stack, NULL) == 0);
    catch(SIGSEGV, SA_ONSTACK);
    for (int i = 0; i < 3; i++) {
        seen.si_signo = 0;
        if (sigsetjmp(back, 1) == 0)
            recurse(1);
        CHECK(seen.si_signo == SIGSEGV && on_stack_ok);
    }

    struct sigaction skip = {.sa_sigaction = skip_ud2, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGILL, &skip, NULL) == 0);
    uint64_t rax = 1, rbx = 0x5a5a, r15 = 0x77;
    register uint64_t r15_in asm("r15") = r15;
    asm volatile("ud2" : "+a"(rax), "+b"(rbx), "+r"(r15_in));
    CHECK(rax == 0x1122334455667788 && rbx == 0x5a5a && r15_in == 0x77);

    // Blocked signals wait, and a queue keeps its values in order.
    struct sigaction queue = {.sa_sigaction = take, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGRTMIN, &queue, NULL) == 0);
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, &old);
    signal(SIGUSR1, bump);
    for (int i = 0; i < 10; i++) {
        CHECK(sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i}) == 0);
        raise(SIGUSR1);
    }
    CHECK(queued == 0 && count == 0);
    sigprocmask(SIG_SETMASK, &old, NULL);
    CHECK(queued == 10 && count == 1, "%d %d", queued, count);
    for (int i = 0; i < 10; i++)
        CHECK(values[i] == i);

    // A signal interrupts a read, or restarts it.
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    // Depends on time, so it is skipped on a loaded machine (with an argument).
    for (int restart = 0; restart < 2 && argc == 1; restart++) {
        struct sigaction act = {.sa_handler = bump, .sa_flags = restart ? SA_RESTART : 0};
        sigaction(SIGUSR1, &act, NULL);
        count = 0;
        pid_t child = fork();
        if (child == 0) {
            struct timespec soon = {.tv_nsec = 30000000};
            nanosleep(&soon, NULL);
            kill(getppid(), SIGUSR1);
            nanosleep(&soon, NULL);
            _exit(write(pipes[1], "x", 1) == 1 ? 0 : 1);
        }
        char c = 0;
        ssize_t n = read(pipes[0], &c, 1);
        CHECK(count == 1);
        if (restart) {
            CHECK(n == 1 && c == 'x');
        } else {
            CHECK(n == -1 && errno == EINTR);
            CHECK(read(pipes[0], &c, 1) == 1);
        }
        reap(child);
    }

    // Many signals in quick succession: no real-time signal and no register is lost.
    queued = 0;
    for (int i = 0; i < 3000; i++)
        CHECK(sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i}) == 0);
    CHECK(queued == 3000);

    // Death by a signal is reported as such, also SIGSEGV of a child without a handler.
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile int *)8 = 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "%#x", status);
    return ok();
}
