// Timers fire, sleeps last as long as requested, and clocks agree and never go back.
#include "check.h"
#include <poll.h>
#include <sys/timerfd.h>

static volatile sig_atomic_t fired;
static void fire(int signo) {
    (void)signo;
    fired++;
}

int main(void) {
    // A sleep is never too short, and the median sleep is late by only a small part of the requested time.
    for (uint64_t ask = 1000000; ask <= 100000000; ask *= 10) {
        int late = 0;
        for (int i = 0; i < 9; i++) {
            struct timespec t = {.tv_nsec = ask};
            uint64_t before = now_ns(CLOCK_MONOTONIC);
            CHECK(clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL) == 0);
            uint64_t took = now_ns(CLOCK_MONOTONIC) - before;
            CHECK(took >= ask, "asked for %lu ns, slept %lu", ask, took);
            late += took > ask + ask / 2 + 4000000;
        }
        CHECK(late <= 4, "%d of 9 sleeps of %lu ns were late", late, ask);
    }
    // Sleeps until an absolute time.
    uint64_t goal = now_ns(CLOCK_MONOTONIC) + 20000000;
    struct timespec at = {goal / 1000000000, goal % 1000000000};
    CHECK(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == 0);
    CHECK(now_ns(CLOCK_MONOTONIC) >= goal);

    // A POSIX timer counts its overruns.
    signal(SIGUSR1, fire);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    timer_t timer;
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    struct itimerspec every = {{0, 10000000}, {0, 10000000}};
    uint64_t start = now_ns(CLOCK_MONOTONIC);
    int expected = 0;
    CHECK(timer_settime(timer, 0, &every, NULL) == 0);
    while (fired < 20) {
        pause();
        expected += 1 + timer_getoverrun(timer);
    }
    uint64_t took = now_ns(CLOCK_MONOTONIC) - start;
    CHECK(took >= 195000000, "20 periods of 10 ms in %lu ns", took);
    CHECK(llabs((long long)(took / 10000000) - expected) <= 2, "%d in %lu ns", expected, took);
    timer_delete(timer);

    // setitimer: real time, and CPU time that only work consumes.
    signal(SIGALRM, fire);
    signal(SIGPROF, fire);
    fired = 0;
    struct itimerval once = {{0, 0}, {0, 30000}};
    start = now_ns(CLOCK_MONOTONIC);
    CHECK(setitimer(ITIMER_REAL, &once, NULL) == 0);
    pause();
    CHECK(fired == 1 && now_ns(CLOCK_MONOTONIC) - start >= 30000000);
    fired = 0;
    once.it_value.tv_usec = 50000;
    CHECK(setitimer(ITIMER_PROF, &once, NULL) == 0);
    struct timespec nap = {.tv_nsec = 80000000};
    nanosleep(&nap, NULL);
    CHECK(fired == 0, "a sleeping process used CPU time");
    start = now_ns(CLOCK_MONOTONIC);
    while (!fired)
        CHECK(now_ns(CLOCK_MONOTONIC) - start < 10000000000ULL, "no SIGPROF");
    CHECK(now_ns(CLOCK_PROCESS_CPUTIME_ID) >= 45000000);

    // timerfd and poll.
    int fd = timerfd_create(CLOCK_MONOTONIC, 0);
    struct itimerspec soon = {{0, 5000000}, {0, 5000000}};
    CHECK(timerfd_settime(fd, 0, &soon, NULL) == 0);
    uint64_t total = 0, n;
    start = now_ns(CLOCK_MONOTONIC);
    while (total < 20) {
        struct pollfd p = {fd, POLLIN, 0};
        CHECK(poll(&p, 1, 1000) == 1);
        CHECK(read(fd, &n, 8) == 8);
        total += n;
    }
    took = now_ns(CLOCK_MONOTONIC) - start;
    CHECK(took >= total * 5000000 - 5000000 && took < total * 5000000 + 50000000, "%lu ticks in %lu ns", total, took);

    // Clocks: the vDSO and the system call agree, and neither goes back.
    uint64_t last = 0;
    for (int i = 0; i < 300000; i++) {
        uint64_t now = now_ns(CLOCK_MONOTONIC);
        CHECK(now >= last, "back by %lu ns", last - now);
        last = now;
        if (i % 1000 == 0) {
            struct timespec t;
            CHECK(syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t) == 0);
            uint64_t kernel = t.tv_sec * 1000000000ULL + t.tv_nsec;
            CHECK(kernel >= last, "the kernel is %lu ns behind the vDSO", last - kernel);
            last = kernel;
            sched_yield();
        }
    }
    uint64_t raw = now_ns(CLOCK_MONOTONIC_RAW), boot = now_ns(CLOCK_BOOTTIME);
    CHECK(llabs((long long)(boot - now_ns(CLOCK_MONOTONIC))) < 1000000000LL);
    nanosleep(&nap, NULL);
    CHECK(now_ns(CLOCK_MONOTONIC_RAW) - raw >= 79000000);
    unsigned cpu = 9, node = 9;
    CHECK(syscall(SYS_getcpu, &cpu, &node, NULL) == 0 && cpu == 0 && node == 0);
    CHECK(sched_getcpu() == 0);
    for (int i = 0; i < 10000; i++)
        sched_yield();
    return ok();
}
