// Attacks of a hostile user program on the monitor: calls of the gate to CPL 0 (`int $4`) with arbitrary addresses, and
// stores to the memory of the kernel and the monitor, which are mapped in the program's page tables.
//   gate int4 SEED     gate scribble FROM BYTES SEED
#include "check.h"

static uint64_t state;
static uint64_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void give_up(int signo) {
    (void)signo;
    _exit(0);
}

// One attempt per child, because most of them die.
static void try_gate(uint64_t monitor) {
    pid_t pid = fork();
    if (pid == 0) {
        alarm(1);
        uint64_t kind = next() % 4;
        register uint64_t r10 asm("r10") = kind == 0   ? next()
                                           : kind == 1 ? monitor + next() % 0x20000
                                           : kind == 2 ? (uint64_t)&give_up
                                                       : next() % 0x7fffffffffff;
        uint64_t rax = next(), rcx = kind == 1 ? 0x6e0 : next(), rdx = next();
        asm volatile("int $4" : "+r"(r10), "+a"(rax), "+c"(rcx), "+d"(rdx)::"memory", "r11");
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
}

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    if (strcmp(argv[1], "int4") == 0) {
        uint64_t monitor = strtoull(argv[2], NULL, 0);
        state = strtoull(argv[3], NULL, 0) * 0x9e3779b97f4a7c15 + 1;
        for (int i = 0; i < 60; i++)
            try_gate(monitor);
        return ok();
    }
    CHECK(argc == 5);
    uint64_t from = strtoull(argv[2], NULL, 0), bytes = strtoull(argv[3], NULL, 0);
    state = strtoull(argv[4], NULL, 0) * 0x9e3779b97f4a7c15 + 1;
    for (int i = 0; i < 200000; i++)
        *(volatile uint64_t *)(from + next() % bytes / 8 * 8) = next();
    return ok();
}
