// FS and GS bases belong to each process and thread, across switches, signals and forks.
#include "check.h"
#include <asm/prctl.h>

static uint64_t base(int code) {
    uint64_t value;
    CHECK(syscall(SYS_arch_prctl, code, &value) == 0);
    return value;
}

static volatile sig_atomic_t handled;
static void handler(int signo) {
    (void)signo;
    handled++;
}

static void *worker(void *arg) {
    uint64_t me = (uintptr_t)arg;
    uint64_t *area = map(PAGE, MAP_PRIVATE);
    area[1] = me;
    uint64_t fs = base(ARCH_GET_FS);
    CHECK(syscall(SYS_arch_prctl, ARCH_SET_GS, area) == 0);
    for (int i = 0; i < 2000; i++) {
        uint64_t got;
        asm volatile("mov %%gs:8, %0" : "=r"(got));
        CHECK(got == me, "thread %lu reads %lu through GS", me, got);
        if (i % 4 == 0)
            sched_yield();
        if (i % 100 == 0) {
            CHECK(base(ARCH_GET_GS) == (uint64_t)area && base(ARCH_GET_FS) == fs);
        }
    }
    return NULL;
}

int main(void) {
    signal(SIGALRM, handler);
    struct itimerval often = {{0, 2000}, {0, 2000}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    pid_t pid[4];
    for (int p = 0; p < 4; p++) {
        pid[p] = fork();
        if (pid[p] == 0) {
            setitimer(ITIMER_REAL, &often, NULL);
            pthread_t thread[6];
            for (uintptr_t i = 0; i < 6; i++)
                CHECK(pthread_create(&thread[i], NULL, worker, (void *)(p * 10 + i)) == 0);
            for (int i = 0; i < 6; i++)
                CHECK(pthread_join(thread[i], NULL) == 0);
            _exit(0);
        }
    }
    for (int p = 0; p < 4; p++) {
        int status;
        while (waitpid(pid[p], &status, 0) < 0)
            CHECK(errno == EINTR);
        CHECK(status == 0, "process %d ended with %#x", p, status);
    }
    // A child inherits the bases and then changes its own; null selectors keep working.
    uint64_t *area = map(PAGE, MAP_PRIVATE);
    area[0] = 77;
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    CHECK(syscall(SYS_arch_prctl, ARCH_SET_GS, area) == 0);
    pid_t child = fork();
    if (child == 0) {
        uint64_t got;
        asm volatile("mov %%gs:0, %0" : "=r"(got));
        CHECK(got == 77);
        CHECK(syscall(SYS_arch_prctl, ARCH_SET_GS, 0) == 0);
        _exit(0);
    }
    reap(child);
    CHECK(base(ARCH_GET_GS) == (uint64_t)area);
    // Only addresses of the user's half are accepted.
    CHECK(syscall(SYS_arch_prctl, ARCH_SET_GS, 0xffff800000000000) == -1 && errno == EPERM);
    return ok();
}
