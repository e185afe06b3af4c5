// Arms four kinds of timer, reports that they are armed, and writes by how many milliseconds each fired late on this
// machine's CLOCK_MONOTONIC. The machine may be paused and resumed while the timers are armed.
#include "check.h"
#include <sys/timerfd.h>

static volatile sig_atomic_t alarmed;
static void note(int signo) {
    (void)signo;
    alarmed = 1;
}

static void *sleeper(void *arg) {
    uint64_t goal = *(uint64_t *)arg;
    struct timespec at = {goal / 1000000000, goal % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) != 0) {
    }
    return (void *)((now_ns(CLOCK_MONOTONIC) - goal) / 1000000);
}

int main(int argc, char **argv) {
    uint64_t ms = argc > 1 ? atoi(argv[1]) : 1000, start = now_ns(CLOCK_MONOTONIC), goal = start + ms * 1000000;
    signal(SIGALRM, note);
    struct itimerval once = {{0, 0}, {ms / 1000, ms % 1000 * 1000}};
    CHECK(setitimer(ITIMER_REAL, &once, NULL) == 0);
    int fd = timerfd_create(CLOCK_MONOTONIC, 0), boot = timerfd_create(CLOCK_BOOTTIME, 0);
    struct itimerspec soon = {{0, 0}, {ms / 1000, ms % 1000 * 1000000}};
    CHECK(timerfd_settime(fd, 0, &soon, NULL) == 0 && timerfd_settime(boot, 0, &soon, NULL) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleeper, &goal) == 0);
    close(open("/root/armed", O_CREAT | O_WRONLY, 0600));
    uint64_t n;
    while (read(fd, &n, 8) != 8) {
    }
    long late_fd = (long)(now_ns(CLOCK_MONOTONIC) - goal) / 1000000;
    while (read(boot, &n, 8) != 8) {
    }
    long late_boot = (long)(now_ns(CLOCK_MONOTONIC) - goal) / 1000000;
    void *late_sleep;
    CHECK(pthread_join(thread, &late_sleep) == 0);
    while (!alarmed)
        usleep(1000);
    long late_alarm = (long)(now_ns(CLOCK_MONOTONIC) - goal) / 1000000;
    printf("timerfd %ld\nboottime %ld\nsleep %ld\nalarm %ld\n", late_fd, late_boot, (long)late_sleep, late_alarm);
    fflush(stdout);
    CHECK(rename("/root/fired.tmp", "/root/fired") == 0);
    return 0;
}
