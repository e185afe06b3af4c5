// A library for LD_PRELOAD that moves the clocks of one process as if the host had been suspended: to CLOCK_REALTIME and
// CLOCK_BOOTTIME it adds the seconds in the file that the variable CUBE_CLOCK names, two int64_t, which a test changes
// while the process runs. The second is added to CLOCK_REALTIME only, as if it had been set. CLOCK_MONOTONIC is the host's.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *ahead_s; // Of both clocks; of CLOCK_REALTIME only.

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CUBE_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *page = mmap(NULL, 2 * sizeof *ahead_s, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED)
        ahead_s = page;
    close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && ahead_s && (is_wall || clock == CLOCK_BOOTTIME))
        now->tv_sec += ahead_s[0] + (is_wall ? ahead_s[1] : 0);
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
