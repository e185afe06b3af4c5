// Shared code of the guest programs. They check themselves, print the failed check, and print "ok" at the end.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition, ...)                                                                        \
    do {                                                                                             \
        if (!(condition)) {                                                                          \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                   \
            printf(" " __VA_ARGS__);                                                                 \
            printf(" (errno %d)\n", errno);                                                          \
            fflush(stdout);                                                                          \
            _exit(1);                                                                                \
        }                                                                                            \
    } while (0)

#define PAGE 4096UL

static inline uint64_t now_ns(clockid_t clock) {
    struct timespec t;
    CHECK(clock_gettime(clock, &t) == 0, "clock %d", clock);
    return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static inline void *map(size_t bytes, int flags) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED, "%zu bytes", bytes);
    return p;
}

// Waits for a child, which must exit with status 0. With -1, waits for any child.
static inline void reap(pid_t pid) {
    int status;
    pid_t got = waitpid(pid, &status, 0);
    CHECK(got > 0 && (pid == -1 || got == pid), "pid %d", pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child ended with %#x", status);
}

static inline int ok(void) {
    puts("ok");
    return 0;
}
