// After a page is moved, dropped, protected or replaced, its old content and old permissions are never visible again.
#include "check.h"

static sigjmp_buf back;
static void jump(int signo) {
    (void)signo;
    siglongjmp(back, 1);
}

static int writes(volatile char *p) {
    if (sigsetjmp(back, 1))
        return 0;
    *p = *p;
    return 1;
}

static int reads(volatile char *p) {
    if (sigsetjmp(back, 1))
        return 0;
    (void)*p;
    return 1;
}

int main(void) {
    signal(SIGSEGV, jump);
    signal(SIGBUS, jump);
    unsigned seed = 1;
    for (int round = 0; round < 400; round++) {
        size_t pages = 1 + rand_r(&seed) % 40;
        char *p = map(pages * PAGE, MAP_PRIVATE);
        for (size_t i = 0; i < pages; i++)
            p[i * PAGE] = 1 + (round + i) % 100;
        // Dropped pages are zero.
        size_t k = rand_r(&seed) % pages;
        CHECK(madvise(p + k * PAGE, PAGE, MADV_DONTNEED) == 0);
        CHECK(p[k * PAGE] == 0, "round %d: a dropped page is visible", round);
        p[k * PAGE] = 101;
        // Moved pages are only at the new address.
        char *target = mmap(NULL, pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char *q = mremap(p, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
        CHECK(q == target);
        CHECK(!reads(p), "round %d: the old address can be read", round);
        CHECK(q[k * PAGE] == 101);
        for (size_t i = 0; i < pages; i++)
            CHECK(i == k || q[i * PAGE] == 1 + (int)((round + i) % 100), "round %d", round);
        // A different mapping at the old address.
        char *again = mmap(p, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(again == p);
        for (size_t i = 0; i < pages; i++)
            CHECK(again[i * PAGE] == 0, "round %d: old content at an old address", round);
        // Permissions, revoked and restored.
        CHECK(mprotect(q, pages * PAGE, PROT_READ) == 0);
        CHECK(reads(q + k * PAGE) && !writes(q + k * PAGE), "round %d: a read-only page was written", round);
        CHECK(mprotect(q, pages * PAGE, PROT_NONE) == 0);
        CHECK(!reads(q + k * PAGE), "round %d: a page without permissions was read", round);
        CHECK(mprotect(q, pages * PAGE, PROT_READ | PROT_WRITE) == 0);
        CHECK(writes(q + k * PAGE) && q[k * PAGE] == 101);
        // Growing a mapping keeps its content.
        q = mremap(q, pages * PAGE, (pages + 8) * PAGE, MREMAP_MAYMOVE);
        CHECK(q != MAP_FAILED && q[k * PAGE] == 101 && q[(pages + 7) * PAGE] == 0);
        // Shrinking a mapping removes the content.
        CHECK(mremap(q, (pages + 8) * PAGE, pages * PAGE, 0) == q);
        CHECK(!reads(q + pages * PAGE));
        munmap(q, pages * PAGE);
        munmap(again, pages * PAGE);
        CHECK(!reads(p) && !reads(q));
    }
    // One page of a file in two mappings, then swapped, then truncated.
    int fd = memfd_create("stale", 0);
    CHECK(ftruncate(fd, 64 * PAGE) == 0);
    char *a = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    for (int i = 0; i < 64; i++)
        a[i * PAGE] = i;
    for (int round = 0; round < 2000; round++) {
        int i = rand_r(&seed) % 64, j = rand_r(&seed) % 64;
        char *p = mmap(a + j * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, i * PAGE);
        CHECK(p == a + j * PAGE && *p == i, "round %d: page %d shows %d", round, i, *p);
    }
    CHECK(ftruncate(fd, PAGE) == 0);
    char *b = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(reads(b) && !reads(b + PAGE));
    CHECK(ftruncate(fd, 2 * PAGE) == 0 && reads(b + PAGE) && b[PAGE] == 0);
    // New code at an old address is executed.
    unsigned char *code = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < 300; i++) {
        unsigned char text[] = {0xb8, i, i >> 8, 0, 0, 0xc3};
        memcpy(code, text, sizeof text);
        if (i % 3 == 0) {
            CHECK(mprotect(code, PAGE, PROT_READ | PROT_EXEC) == 0);
        }
        CHECK(((int (*)(void))code)() == i);
        CHECK(mprotect(code, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
        if (i % 7 == 0) {
            CHECK(madvise(code, PAGE, MADV_DONTNEED) == 0);
        }
    }
    // Large ranges at once: more than one page table.
    for (int i = 0; i < 6; i++) {
        char *big = map(24 << 20, MAP_PRIVATE);
        memset(big, 1 + i, 24 << 20);
        CHECK(madvise(big + (2 << 20), 20 << 20, MADV_DONTNEED) == 0);
        for (size_t at = 0; at < 24UL << 20; at += PAGE) {
            int dropped = at >= 2UL << 20 && at < 22UL << 20;
            CHECK(big[at] == (dropped ? 0 : 1 + i), "at %#zx", at);
        }
        munmap(big, 24 << 20);
        CHECK(!reads(big) && !reads(big + (23 << 20)));
    }
    return ok();
}
