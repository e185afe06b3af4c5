// Pipes, socket pairs, passed descriptors, epoll, eventfd, inotify, signalfd, loopback TCP.
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

static void pipes(void) {
    int p[2];
    CHECK(pipe(p) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(p[0]);
        for (uint64_t i = 0; i < 20000; i++) {
            uint64_t block[16];
            for (int j = 0; j < 16; j++)
                block[j] = i * 16 + j;
            CHECK(write(p[1], block, sizeof block) == sizeof block);
        }
        _exit(0);
    }
    close(p[1]);
    uint64_t next = 0, got[512];
    size_t held = 0;
    ssize_t n;
    while ((n = read(p[0], (char *)got + held, sizeof got - held)) > 0) {
        held += n;
        size_t whole = held / 8;
        for (size_t i = 0; i < whole; i++)
            CHECK(got[i] == next++, "at %lu", next);
        memmove(got, got + whole, held - whole * 8);
        held -= whole * 8;
    }
    CHECK(next == 20000 * 16 && held == 0);
    close(p[0]);
    reap(child);
    CHECK(pipe(p) == 0);
    close(p[0]);
    signal(SIGPIPE, SIG_IGN);
    CHECK(write(p[1], "x", 1) == -1 && errno == EPIPE);
    close(p[1]);
}

static void round_trips(void) {
    int s[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0);
    pid_t child = fork();
    char c;
    if (child == 0) {
        close(s[0]);
        while (read(s[1], &c, 1) == 1)
            CHECK(write(s[1], &c, 1) == 1);
        _exit(0);
    }
    close(s[1]);
    for (int i = 0; i < 3000; i++) {
        c = i;
        CHECK(write(s[0], &c, 1) == 1 && read(s[0], &c, 1) == 1 && c == (char)i);
    }
    close(s[0]);
    reap(child);
}

static void passed_descriptor(void) {
    int s[2], p[2];
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, s) == 0 && pipe(p) == 0);
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {"x", 1};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(c), &p[1], sizeof(int));
    CHECK(sendmsg(s[0], &m, 0) == 1);
    close(p[1]);
    char byte;
    iov.iov_base = &byte;
    CHECK(recvmsg(s[1], &m, 0) == 1);
    int got;
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(int));
    CHECK(write(got, "y", 1) == 1 && read(p[0], &byte, 1) == 1 && byte == 'y');
    close(got), close(p[0]), close(s[0]), close(s[1]);
}

// A directory of this process's own: other programs may create files in /tmp at the same time.
static void watched_directory(void) {
    enum { FILES = 50 };
    char dir[] = "/tmp/ipcXXXXXX", name[64];
    CHECK(mkdtemp(dir) != NULL);
    int in = inotify_init1(0);
    CHECK(inotify_add_watch(in, dir, IN_CREATE | IN_DELETE) > 0);
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "%s/%d", dir, i);
        close(open(name, O_CREAT | O_WRONLY, 0600));
        unlink(name);
    }
    CHECK(rmdir(dir) == 0);
    char buffer[8192] __attribute__((aligned(8)));
    ssize_t got = read(in, buffer, sizeof buffer);
    char *at = buffer;
    for (int i = 0; i < 2 * FILES; i++) {
        struct inotify_event *event = (void *)at;
        snprintf(name, sizeof name, "%d", i / 2);
        CHECK(at < buffer + got && event->mask == (i % 2 ? IN_DELETE : IN_CREATE) && strcmp(event->name, name) == 0,
              "event %d of %zd bytes: mask %#x, name %s, not %s", i, got, event->mask, event->name, name);
        at += sizeof *event + event->len;
    }
    close(in);
}

static void events(void) {
    int ep = epoll_create1(0), ev = eventfd(0, EFD_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN | EPOLLET, .data.u32 = 5};
    CHECK(epoll_ctl(ep, EPOLL_CTL_ADD, ev, &e) == 0);
    CHECK(epoll_wait(ep, &e, 1, 0) == 0);
    uint64_t n = 3;
    CHECK(write(ev, &n, 8) == 8 && write(ev, &n, 8) == 8);
    CHECK(epoll_wait(ep, &e, 1, 1000) == 1 && e.data.u32 == 5);
    CHECK(epoll_wait(ep, &e, 1, 0) == 0, "edge-triggered");
    CHECK(read(ev, &n, 8) == 8 && n == 6);
    // A child's write wakes a waiting parent.
    pid_t child = fork();
    if (child == 0) {
        struct timespec soon = {.tv_nsec = 20000000};
        nanosleep(&soon, NULL);
        _exit(write(ev, &n, 8) == 8 ? 0 : 1);
    }
    CHECK(epoll_wait(ep, &e, 1, 5000) == 1);
    reap(child);
    close(ep), close(ev);
    watched_directory();
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int sfd = signalfd(-1, &set, 0);
    raise(SIGUSR2);
    struct signalfd_siginfo info;
    CHECK(read(sfd, &info, sizeof info) == sizeof info && info.ssi_signo == SIGUSR2);
    close(sfd);
}

static void loopback(void) {
    int server = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    CHECK(bind(server, (void *)&at, len) == 0 && listen(server, 5) == 0 && getsockname(server, (void *)&at, &len) == 0);
    static unsigned char block[64 << 10];
    pid_t child = fork();
    if (child == 0) {
        int s = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(s, (void *)&at, sizeof at) == 0);
        for (int i = 0; i < 256; i++) {
            for (size_t j = 0; j < sizeof block; j++)
                block[j] = i * 7 + j;
            for (size_t sent = 0; sent < sizeof block;) {
                ssize_t n = write(s, block + sent, sizeof block - sent);
                CHECK(n > 0);
                sent += n;
            }
        }
        _exit(0);
    }
    int s = accept(server, NULL, NULL);
    CHECK(s >= 0);
    size_t total = 0;
    ssize_t n;
    while ((n = read(s, block, sizeof block)) > 0)
        for (ssize_t i = 0; i < n; i++, total++)
            CHECK(block[i] == (unsigned char)((total >> 16) * 7 + (total & 0xffff)), "at %zu", total);
    CHECK(total == 256 * sizeof block, "%zu", total);
    close(s), close(server);
    reap(child);
}

int main(void) {
    pipes();
    round_trips();
    passed_descriptor();
    events();
    loopback();
    return ok();
}
