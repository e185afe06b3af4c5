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

#define EXPECT(signal, code, address, act) EXPECT_IN(signal, code, address, address, act)

#define EXPECT_IN(signal, code, first, last, act)                                                    \
    do {                                                                                             \
        seen.si_signo = 0;                                                                           \
        if (sigsetjmp(back, 1) == 0) {                                                               \
            act;                                                                                     \
        }                                                                                            \
        CHECK(seen.si_signo == (signal), "signal %d", seen.si_signo);                                \
        CHECK(seen.si_code == (code), "code %d", seen.si_code);                                      \
        CHECK((uintptr_t)seen.si_addr >= (uintptr_t)(first), "address %p", seen.si_addr);            \
        CHECK((uintptr_t)seen.si_addr <= (uintptr_t)(last), "address %p", seen.si_addr);             \
    } while (0)

// One access at `q + OFFSET`, in a page that allows none, by each kind of instruction. The guest's hypervisor finds the
// address from the instruction.
static void operands(char *q) {
#define AT(offset, ...)                                                                              \
    EXPECT(SIGSEGV, SEGV_ACCERR, q + (offset), asm volatile(__VA_ARGS__ : "memory", "cc", "rax", "rdx"))
    const uint64_t two = 2;
    AT(0, "mov (%0), %%al" ::"r"(q));
    AT(9, "mov 9(%0), %%rax" ::"r"(q));
    AT(1016, "mov 1000(%0,%1,8), %%eax" ::"r"(q), "r"(two));
    AT(2, "mov (%0,%1), %%ax" ::"r"(q), "r"(two));
    AT(16, "mov (,%0,8), %%rax" ::"r"((uint64_t)q / 8 + 2));
    AT(24, "movq $5, 24(%0)" ::"r"(q));
    AT(26, "movw $5, 26(%0)" ::"r"(q));
    AT(27, "movb $5, 27(%0)" ::"r"(q));
    AT(32, "mov %%rax, 32(%0)" ::"r"(q));
    AT(33, "mov 33(%0), %%rax; mov %%rax, (%0)" ::"r"(q));
    AT(36, "movzbl 36(%0), %%eax" ::"r"(q));
    AT(37, "movsbq 37(%0), %%rax" ::"r"(q));
    AT(38, "movslq 38(%0), %%rax" ::"r"(q));
    AT(40, "add %%rax, 40(%0)" ::"r"(q));
    AT(41, "cmpb $1, 41(%0)" ::"r"(q));
    AT(42, "testl $1, 42(%0)" ::"r"(q));
    AT(43, "notq 43(%0)" ::"r"(q));
    AT(44, "shlq $3, 44(%0)" ::"r"(q));
    AT(45, "imul $100, 45(%0), %%eax" ::"r"(q));
    AT(46, "divq 46(%0)" ::"r"(q));
    AT(47, "incl 47(%0)" ::"r"(q));
    AT(48, "lock cmpxchg %%rdx, 48(%0)" ::"r"(q));
    AT(56, "lock xadd %%rax, 56(%0)" ::"r"(q));
    AT(64, "xchg %%rax, 64(%0)" ::"r"(q));
    AT(80, "btl $3, 80(%0)" ::"r"(q));
    AT(88, "lock bts %1, 80(%0)" ::"r"(q), "r"(64UL));
    AT(81, "sete 81(%0)" ::"r"(q));
    AT(82, "cmove 82(%0), %%rax" ::"r"(q));
    AT(84, "crc32q 84(%0), %%rax" ::"r"(q));
    AT(96, "movups 96(%0), %%xmm0" ::"r"(q));
    AT(113, "movdqu %%xmm0, 113(%0)" ::"r"(q));
    AT(128, "movsd %%xmm0, 128(%0)" ::"r"(q));
    AT(144, "pshufb 144(%0), %%xmm0" ::"r"(q));
    AT(160, "palignr $4, 160(%0), %%xmm0" ::"r"(q));
    AT(176, "fldl 176(%0)" ::"r"(q));
    AT(184, "push 184(%0)" ::"r"(q));
    AT(192, "call *192(%0)" ::"r"(q));
    AT(200, "jmp *200(%0)" ::"r"(q));
    // EDX:EAX says which states are saved, and so how long the area is: here x87 and SSE, 576 bytes. Intel's processors
    // name its last byte, AMD's the first.
    EXPECT_IN(SIGSEGV, SEGV_ACCERR, q + 256, q + 256 + 575,
              asm volatile("xsave 256(%0)" ::"r"(q), "a"(3), "d"(0)));
    AT(300, "movsb" ::"S"(q + 300), "D"(q - PAGE));
    AT(301, "movsq" ::"S"(q - PAGE), "D"(q + 301));
    AT(302, "lodsl" ::"S"(q + 302));
    AT(303, "cmpsb" ::"S"(q - PAGE), "D"(q + 303));
    AT(304, "cmpsb" ::"S"(q + 304), "D"(q - PAGE));
    AT(305, "scasb" ::"D"(q + 305));
    AT(0, "rep movsb" ::"S"(q - 10), "D"(q - PAGE), "c"(100UL));
    AT(0, "rep stosq" ::"D"(q - 16), "c"(100UL));
    AT(0, "mov -3(%0), %%rax" ::"r"(q));
    AT(0, "movups %%xmm0, -1(%0)" ::"r"(q));
    AT(-8 + 16, "mov %0, %%rsp; push %%rax" ::"r"(q + 16));
    AT(320, "mov %0, %%rsp; pop %%rax" ::"r"(q + 320));
    AT(328, "mov %0, %%rsp; ret" ::"r"(q + 328));
    AT(8, "mov %0, %%rsp; call 1f; 1:" ::"r"(q + 16));
    if (__builtin_cpu_supports("avx2")) {
        AT(345, "vmovdqu 345(%0), %%ymm0; vzeroupper" ::"r"(q));
        AT(400, "vpcmpeqb 400(%0), %%ymm0, %%ymm1; vzeroupper" ::"r"(q));
        AT(432, "vmovdqu %%ymm0, 432(%0); vzeroupper" ::"r"(q));
        AT(0, "vmovdqu -5(%0), %%ymm0; vzeroupper" ::"r"(q));
        AT(464, "vpbroadcastb 464(%0), %%ymm0; vzeroupper" ::"r"(q));
        AT(480, "vpxor %%ymm1, %%ymm1, %%ymm1; vpcmpeqd %%ymm2, %%ymm2, %%ymm2;"
                "vpgatherdd %%ymm2, 480(%0,%%ymm1), %%ymm0; vzeroupper" ::"r"(q));
    }
    // The thread's segment.
    uint64_t base;
    asm("mov %%fs:0, %0" : "=r"(base));
    AT(496, "mov %%fs:(%0), %%rax" ::"r"(q + 496 - base));
}

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
    CHECK(mprotect(p + 12 * PAGE, PAGE, PROT_NONE) == 0);
    operands(p + 12 * PAGE);
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
