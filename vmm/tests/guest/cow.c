// Copy-on-write after fork and vfork, with shared and private mappings, in both directions.
#include "check.h"

#define PAGES 512

static void fill(unsigned char *p, unsigned char tag) {
    for (size_t i = 0; i < PAGES; i++)
        memset(p + i * PAGE, tag + i, 64);
}

static int holds(unsigned char *p, unsigned char tag) {
    for (size_t i = 0; i < PAGES; i++)
        for (size_t j = 0; j < 64; j++)
            if (p[i * PAGE + j] != (unsigned char)(tag + i))
                return 0;
    return 1;
}

int main(void) {
    unsigned char *own = map(PAGES * PAGE, MAP_PRIVATE);
    unsigned char *shared = map(PAGES * PAGE, MAP_SHARED);
    int to_child[2], to_parent[2];
    CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
    char c;
    for (int round = 0; round < 20; round++) {
        fill(own, round);
        fill(shared, round);
        pid_t pid = fork();
        if (pid == 0) {
            CHECK(holds(own, round));
            CHECK(read(to_child[0], &c, 1) == 1);
            // At this point the parent has written.
            CHECK(holds(own, round), "the parent's private write is visible");
            CHECK(holds(shared, round + 1), "the parent's shared write is not visible");
            fill(own, round + 2);
            fill(shared, round + 2);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                CHECK(holds(own, round + 2));
                fill(own, round + 3);
                _exit(0);
            }
            reap(grandchild);
            CHECK(holds(own, round + 2), "the grandchild's write is visible");
            CHECK(write(to_parent[1], "x", 1) == 1);
            _exit(0);
        }
        fill(own, round + 1);
        fill(shared, round + 1);
        CHECK(write(to_child[1], "x", 1) == 1);
        CHECK(read(to_parent[0], &c, 1) == 1);
        CHECK(holds(own, round + 1), "the child's private write is visible");
        CHECK(holds(shared, round + 2), "the child's shared write is not visible");
        reap(pid);
    }
    // A vfork child works on the parent's memory.
    volatile int touched = 0;
    pid_t pid = vfork();
    if (pid == 0) {
        touched = 7;
        _exit(0);
    }
    CHECK(touched == 7);
    reap(pid);
    // Writes to a private file mapping do not reach the file; writes to a shared one do.
    char name[] = "/tmp/cowXXXXXX";
    int fd = mkstemp(name);
    unlink(name);
    CHECK(ftruncate(fd, PAGE) == 0);
    char *a = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    char *b = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    b[0] = 'b';
    CHECK(a[0] == 'b');
    a[0] = 'a';
    CHECK(b[0] == 'b');
    CHECK(pread(fd, &c, 1, 0) == 1 && c == 'b');
    // The zero page is never written, whichever process reads it first.
    volatile char *zero = map(64 * PAGE, MAP_PRIVATE);
    for (size_t i = 0; i < 64; i++)
        CHECK(zero[i * PAGE] == 0);
    for (size_t i = 0; i < 64; i++) {
        zero[i * PAGE] = 1;
        CHECK(i == 63 || zero[(i + 1) * PAGE] == 0);
    }
    // The kernel's writes also break copy-on-write.
    for (int i = 0; i < 50; i++) {
        fill(own, 0);
        pid = fork();
        if (pid == 0) {
            _exit(0);
        }
        CHECK(pwrite(fd, "kernel", 6, 0) == 6);
        CHECK(pread(fd, own + 3 * PAGE, 6, 0) == 6);
        CHECK(memcmp(own + 3 * PAGE, "kernel", 6) == 0);
        reap(pid);
    }
    return ok();
}
