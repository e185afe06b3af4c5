// Single steps over known instructions, peek and poke, software and hardware breakpoints, system calls.
#include "check.h"
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/user.h>

extern char step_begin[], step_end[], poked[];
volatile uint64_t watched = 0x1111;

// 64 one-byte nops between two labels, then a store to `watched`.
static void body(void) {
    asm volatile("int3\n"
                 ".globl step_begin\nstep_begin:\n"
                 ".rept 64\nnop\n.endr\n"
                 ".globl step_end\nstep_end:\n"
                 ".globl poked\npoked: mov $1, %%eax\n"
                 "movq $0x2222, %0\n"
                 "nop\n"
                 : "=m"(watched)::"eax");
}

static void wait_stop(pid_t pid, int signo) {
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == signo, "status %#x", status);
}

static pid_t traced(void) {
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0);
        body();
        getppid();
        _exit(watched == 0x2222 ? 0 : 1);
    }
    wait_stop(pid, SIGTRAP);
    return pid;
}

static uint64_t rip(pid_t pid) {
    struct user_regs_struct regs;
    CHECK(ptrace(PTRACE_GETREGS, pid, 0, &regs) == 0);
    return regs.rip;
}

static void end(pid_t pid) {
    CHECK(ptrace(PTRACE_CONT, pid, 0, 0) == 0);
    reap(pid);
}

static void set_debug(pid_t pid, int n, uint64_t value) {
    long at = offsetof(struct user, u_debugreg) + 8 * n;
    CHECK(ptrace(PTRACE_POKEUSER, pid, at, value) == 0, "register %d", n);
}

static uint64_t debug6(pid_t pid) {
    return ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, u_debugreg) + 48, 0);
}

int main(int argc, char **argv) {
    int hardware = argc > 1 && strcmp(argv[1], "hardware") == 0;
    pid_t pid = traced();
    if (!hardware) {
        CHECK(rip(pid) == (uint64_t)step_begin);
        int steps = 0;
        while (rip(pid) != (uint64_t)step_end) {
            CHECK(ptrace(PTRACE_SINGLESTEP, pid, 0, 0) == 0);
            wait_stop(pid, SIGTRAP);
            siginfo_t info;
            CHECK(ptrace(PTRACE_GETSIGINFO, pid, 0, &info) == 0);
            CHECK(info.si_code == TRAP_TRACE, "code %d", info.si_code);
            steps++;
            CHECK(rip(pid) == (uint64_t)step_begin + steps, "step %d", steps);
        }
        CHECK(steps == 64, "%d steps", steps);
        end(pid);

        // Steps across system calls and faults count once each, and the trap flag does not stay set.
        pid = traced();
        struct user_regs_struct regs;
        for (steps = 0; steps < 3000; steps++) {
            int status;
            CHECK(ptrace(PTRACE_SINGLESTEP, pid, 0, 0) == 0);
            CHECK(waitpid(pid, &status, 0) == pid);
            if (WIFEXITED(status)) {
                CHECK(WEXITSTATUS(status) == 0);
                break;
            }
            CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP, "status %#x", status);
        }
        CHECK(steps > 70 && steps < 3000, "%d steps to the end", steps);

        // Peek, poke (which unshares a page), a breakpoint by hand, registers.
        pid = traced();
        errno = 0;
        long word = ptrace(PTRACE_PEEKTEXT, pid, poked, 0);
        CHECK(errno == 0 && word == *(long *)poked);
        CHECK(ptrace(PTRACE_POKETEXT, pid, poked, (word & ~0xffL) | 0xcc) == 0);
        CHECK(*(unsigned char *)poked == 0xb8, "the parent's text changed");
        CHECK(ptrace(PTRACE_CONT, pid, 0, 0) == 0);
        wait_stop(pid, SIGTRAP);
        CHECK(ptrace(PTRACE_GETREGS, pid, 0, &regs) == 0);
        CHECK(regs.rip == (uint64_t)poked + 1);
        CHECK(ptrace(PTRACE_POKETEXT, pid, poked, word) == 0);
        regs.rip--;
        regs.r12 = 0xabcdef;
        CHECK(ptrace(PTRACE_SETREGS, pid, 0, &regs) == 0);
        CHECK(ptrace(PTRACE_SINGLESTEP, pid, 0, 0) == 0);
        wait_stop(pid, SIGTRAP);
        CHECK(ptrace(PTRACE_GETREGS, pid, 0, &regs) == 0);
        CHECK(regs.rip == (uint64_t)poked + 5 && (uint32_t)regs.rax == 1 && regs.r12 == 0xabcdef);
        CHECK(ptrace(PTRACE_PEEKDATA, pid, &watched, 0) == 0x1111);
        // A system call stops twice.
        CHECK(ptrace(PTRACE_SETOPTIONS, pid, 0, PTRACE_O_TRACESYSGOOD) == 0);
        int found = 0;
        for (int i = 0; i < 2; i++) {
            CHECK(ptrace(PTRACE_SYSCALL, pid, 0, 0) == 0);
            wait_stop(pid, SIGTRAP | 0x80);
            CHECK(ptrace(PTRACE_GETREGS, pid, 0, &regs) == 0);
            found += regs.orig_rax == SYS_getppid;
        }
        CHECK(found == 2 && (pid_t)regs.rax == getpid(), "%d stops, rax %lld", found, regs.rax);
        end(pid);
        return ok();
    }
    // An execution breakpoint.
    set_debug(pid, 0, (uint64_t)poked);
    set_debug(pid, 7, 1);
    CHECK(ptrace(PTRACE_CONT, pid, 0, 0) == 0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status)) {
        // Debug registers that never match are a limit of the host's KVM; registers that match only sometimes are a
        // bug.
        CHECK(WEXITSTATUS(status) == 0);
        puts("no hardware breakpoints");
        return ok();
    }
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP, "status %#x", status);
    CHECK(rip(pid) == (uint64_t)poked, "stopped at %#lx", rip(pid));
    CHECK(debug6(pid) & 1, "dr6 %#lx", debug6(pid));
    // An 8-byte watchpoint on writes, which stops after the store.
    set_debug(pid, 7, 0);
    set_debug(pid, 1, (uint64_t)&watched);
    set_debug(pid, 7, 1 << 2 | 9u << 20);
    CHECK(ptrace(PTRACE_CONT, pid, 0, 0) == 0);
    wait_stop(pid, SIGTRAP);
    CHECK(ptrace(PTRACE_PEEKDATA, pid, &watched, 0) == 0x2222);
    CHECK(debug6(pid) & 2, "dr6 %#lx", debug6(pid));
    set_debug(pid, 7, 0);
    end(pid);
    return ok();
}
