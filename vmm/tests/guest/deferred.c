// Touches each page of a file with an instruction of one kind (KIND). A device has read the file into memory, and this
// instruction is the CPU's first access to the page. Where KVM has no slot for the memory, KVM has to emulate the
// instruction, and for some instructions it cannot.
// usage: deferred KIND FILE; deferred make FILE
#include "check.h"

// Pages of the file: more than the free memory that the guest has touched before.
#define PAGES 24576UL
#define WORDS (PAGE / 8)
// A routine that returns 7, at this offset of every page.
#define CODE 1024
static const unsigned char RETURN_7[] = {0xb8, 7, 0, 0, 0, 0xc3};

static void pattern(uint64_t *page, uint64_t number) {
    for (uint64_t i = 0; i < WORDS; i++)
        page[i] = number << 16 | i;
    memcpy((unsigned char *)page + CODE, RETURN_7, sizeof RETURN_7);
}

// The content of a page before the instruction, and the content that the page must have after it.
static _Alignas(64) unsigned char before[PAGE], expected[PAGE], other[2 * PAGE];

static uint64_t word(const void *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

#define AT(type, at) (*(volatile type *)(at))

static void load(unsigned char *p) {
    CHECK(AT(uint8_t, p + 9) == before[9]);
    CHECK(AT(uint64_t, p + 16) == word(before + 16));
}

static void store(unsigned char *p) {
    AT(uint64_t, p + 24) = 5;
    memset(expected + 24, 0, 8);
    expected[24] = 5;
}

// Crosses the end of the page into the next page of the file.
static void crossing(unsigned char *p) {
    uint64_t number = word(before) >> 16, value;
    if (number + 1 == PAGES)
        return;
    asm volatile("mov (%1), %0" : "=r"(value) : "r"(p + PAGE - 4) : "memory");
    CHECK(value == (word(before + PAGE - 8) >> 32 | (number + 1) << 48));
}

static void copy_from(unsigned char *p) {
    void *to = other;
    const void *from = p;
    uint64_t n = PAGE;
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n)::"memory");
    CHECK(memcmp(other, before, PAGE) == 0);
}

static void copy_to(unsigned char *p) {
    for (unsigned i = 0; i < PAGE; i++)
        expected[i] = i * 7;
    void *to = p;
    const void *from = expected;
    uint64_t n = PAGE / 8;
    asm volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(n)::"memory");
}

static void fill(unsigned char *p) {
    memset(expected, 0x5a, PAGE);
    void *to = p;
    uint64_t n = PAGE;
    asm volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(0x5a) : "memory");
}

static void compare(unsigned char *p) {
    const void *a = p, *b = before;
    uint64_t n = PAGE;
    asm volatile("cld; repe cmpsb" : "+S"(a), "+D"(b), "+c"(n)::"memory", "cc");
    CHECK(n == 0 && a == p + PAGE);
}

static void exchange(unsigned char *p) {
    uint64_t value = 77;
    asm volatile("xchg %0, (%1)" : "+r"(value) : "r"(p + 32) : "memory");
    CHECK(value == word(before + 32));
    memset(expected + 32, 0, 8);
    expected[32] = 77;
}

static void locked(unsigned char *p) {
    uint64_t added = 3, was = word(before + 40);
    asm volatile("lock xadd %0, (%1)" : "+r"(added) : "r"(p + 40) : "memory", "cc");
    CHECK(added == was);
    uint64_t sum = was + 3;
    memcpy(expected + 40, &sum, 8);
    asm volatile("lock btsl $5, (%0); lock decb 1(%0); negw 2(%0)" ::"r"(p + 48) : "memory", "cc");
    expected[48] |= 1 << 5;
    expected[49]--;
    uint16_t half;
    memcpy(&half, expected + 50, 2);
    half = -half;
    memcpy(expected + 50, &half, 2);
}

static void compare_exchange(unsigned char *p) {
    uint64_t was = word(before + 56);
    CHECK(__sync_val_compare_and_swap((uint64_t *)(p + 56), was, 9) == was);
    CHECK(__sync_val_compare_and_swap((uint64_t *)(p + 64), word(before + 64) + 1, 9) == word(before + 64));
    memset(expected + 56, 0, 8);
    expected[56] = 9;
}

static void compare_exchange_16(unsigned char *p) {
    uint64_t low = word(before + 80), high = word(before + 88);
    unsigned char same;
    asm volatile("lock cmpxchg16b (%3); sete %0"
                 : "=q"(same), "+a"(low), "+d"(high)
                 : "r"(p + 80), "b"(1UL), "c"(2UL)
                 : "memory", "cc");
    CHECK(same);
    memset(expected + 80, 0, 16);
    expected[80] = 1;
    expected[88] = 2;
}

static void sse(unsigned char *p) {
    asm volatile("movaps (%0), %%xmm1; movaps %%xmm1, 16(%0)" ::"r"(p + 96) : "xmm1", "memory");
    memcpy(expected + 112, before + 96, 16);
}

static void sse_arithmetic(unsigned char *p) {
    uint64_t out[2];
    asm volatile("pxor %%xmm1, %%xmm1; paddq (%1), %%xmm1; movdqu %%xmm1, (%0)" ::"r"(out), "r"(p + 96)
                 : "xmm1", "memory");
    CHECK(memcmp(out, before + 96, 16) == 0);
}

static void avx_load(unsigned char *p) {
    asm volatile("vmovdqu (%0), %%ymm1; vmovdqu %%ymm1, (%1); vzeroupper" ::"r"(p + 130), "r"(other)
                 : "xmm1", "memory");
    CHECK(memcmp(other, before + 130, 32) == 0);
}

static void avx_store(unsigned char *p) {
    memcpy(expected + 256, before + 320, 32);
    asm volatile("vmovdqu (%0), %%ymm1; vmovntdq %%ymm1, (%1); vzeroupper; sfence" ::"r"(before + 320), "r"(p + 256)
                 : "xmm1", "memory");
}

static void state_area(unsigned char *p) {
    // Stores the FPU state in the page and loads it again.
    asm volatile("fxsave (%0); fxrstor (%0)" ::"r"(p + 512) : "memory");
    memcpy(expected + 512, p + 512, 512);
    CHECK(memcmp(expected + 512, before + 512, 512) != 0);
}

static void x87(unsigned char *p) {
    asm volatile("fildq (%0); fistpq 8(%0)" ::"r"(p + 160) : "memory", "st");
    memcpy(expected + 168, before + 160, 8);
}

static void stack(unsigned char *p) {
    uint64_t value;
    asm volatile("mov %%rsp, %%r12; mov %1, %%rsp; pop %0; push $-3; call 1f; 1: mov %%r12, %%rsp"
                 : "=r"(value)
                 : "r"(p + 192)
                 : "r12", "memory");
    CHECK(value == word(before + 192));
    // The return address, below the pushed value.
    memset(expected + 192, 0xff, 8);
    expected[192] = 0xfd;
    memcpy(expected + 184, p + 184, 8);
}

static void code(unsigned char *p) {
    int (*routine)(void) = (int (*)(void))(p + CODE);
    CHECK(routine() == 7);
}

// The kernel reads the page, and writes it.
static void system_call(unsigned char *p) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(write(pipes[1], p, PAGE) == (ssize_t)PAGE);
    CHECK(read(pipes[0], other, PAGE) == (ssize_t)PAGE && memcmp(other, before, PAGE) == 0);
    CHECK(write(pipes[1], other, 100) == 100 && read(pipes[0], p + 300, 100) == 100);
    memcpy(expected + 300, other, 100);
    close(pipes[0]);
    close(pipes[1]);
}

static const struct kind {
    const char *name;
    void (*touch)(unsigned char *);
} KINDS[] = {
    {"load", load},
    {"store", store},
    {"crossing", crossing},
    {"copy_from", copy_from},
    {"copy_to", copy_to},
    {"fill", fill},
    {"compare", compare},
    {"exchange", exchange},
    {"locked", locked},
    {"compare_exchange", compare_exchange},
    {"compare_exchange_16", compare_exchange_16},
    {"sse", sse},
    {"sse_arithmetic", sse_arithmetic},
    {"avx_load", avx_load},
    {"avx_store", avx_store},
    {"state_area", state_area},
    {"x87", x87},
    {"stack", stack},
    {"code", code},
    {"system_call", system_call},
};

static int make(const char *path) {
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    CHECK(fd >= 0);
    for (uint64_t i = 0; i < PAGES; i++) {
        pattern((uint64_t *)other, i);
        CHECK(write(fd, other, PAGE) == (ssize_t)PAGE);
    }
    CHECK(fsync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    return ok();
}

static int touch_all(const struct kind *kind, const char *path) {
    int fd = open(path, O_RDWR);
    CHECK(fd >= 0);
    unsigned char *file = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED, fd, 0);
    CHECK(file != MAP_FAILED);
    for (uint64_t i = 0; i < PAGES; i++) {
        pattern((uint64_t *)before, i);
        memcpy(expected, before, PAGE);
        kind->touch(file + i * PAGE);
        CHECK(memcmp(file + i * PAGE, expected, PAGE) == 0, "page %lu", i);
    }
    return ok();
}

static int missing(const char *kind) {
    return strncmp(kind, "avx", 3) == 0 && !__builtin_cpu_supports("avx");
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    if (strcmp(argv[1], "make") == 0)
        return make(argv[2]);
    if (missing(argv[1]))
        return ok();
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (strcmp(argv[1], KINDS[i].name) == 0)
            return touch_all(&KINDS[i], argv[2]);
    CHECK(!"such a kind", "%s", argv[1]);
}
