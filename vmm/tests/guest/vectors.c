// Vector, x87 and control registers survive context switches and signals. Several processes share one CPU, and each has
// its own pattern in its registers, which no other process may see.
#include "check.h"
#include <cpuid.h>
#include <immintrin.h>

static int avx512;
static volatile sig_atomic_t handled;

__attribute__((target("avx512f"))) static void dirty512(void) {
    __m512i x = _mm512_set1_epi8(0x5a);
    asm volatile("vmovdqa64 %0, %%zmm0\nvmovdqa64 %0, %%zmm15\nvmovdqa64 %0, %%zmm31\nkmovw %1, %%k1" ::"v"(x), "r"(0)
                 : "xmm0", "xmm15", "xmm31", "k1");
}

__attribute__((target("avx"))) static void dirty(void) {
    asm volatile("vpcmpeqd %%xmm0, %%xmm0, %%xmm0\nvmovaps %%xmm0, %%xmm7\nvmovaps %%xmm0, %%xmm15" ::: "xmm0", "xmm7", "xmm15");
}

static void handler(int signo) {
    (void)signo;
    handled++;
    if (avx512)
        dirty512();
    else
        dirty();
    asm volatile("fninit");
    unsigned mxcsr = 0x1fbf;
    asm volatile("ldmxcsr %0" ::"m"(mxcsr));
}

typedef unsigned char Line[64] __attribute__((aligned(64)));

// Loads 16 (or 32) registers, executes `pause` and stores them again; no code in between may use them.
__attribute__((target("avx"))) static void round256(Line *in, Line *out, long call) {
    asm volatile("vmovaps (%1), %%ymm0\nvmovaps 64(%1), %%ymm1\nvmovaps 128(%1), %%ymm2\nvmovaps 192(%1), %%ymm3\n"
                 "vmovaps 256(%1), %%ymm7\nvmovaps 320(%1), %%ymm8\nvmovaps 384(%1), %%ymm14\nvmovaps 448(%1), %%ymm15\n"
                 "mov $2000, %%r8d\n1: dec %%r8d\njnz 1b\n"
                 "syscall\n"
                 "mov $2000, %%r8d\n1: dec %%r8d\njnz 1b\n"
                 "vmovaps %%ymm0, (%2)\nvmovaps %%ymm1, 64(%2)\nvmovaps %%ymm2, 128(%2)\nvmovaps %%ymm3, 192(%2)\n"
                 "vmovaps %%ymm7, 256(%2)\nvmovaps %%ymm8, 320(%2)\nvmovaps %%ymm14, 384(%2)\nvmovaps %%ymm15, 448(%2)\n"
                 : "+a"(call)
                 : "b"(in), "d"(out)
                 : "rcx", "r11", "r8", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm7", "xmm8", "xmm14", "xmm15");
}

__attribute__((target("avx512f"))) static void round512(Line *in, Line *out, long call, unsigned *mask) {
    asm volatile("vmovaps (%1), %%zmm0\nvmovaps 64(%1), %%zmm1\nvmovaps 128(%1), %%zmm15\nvmovaps 192(%1), %%zmm16\n"
                 "vmovaps 256(%1), %%zmm17\nvmovaps 320(%1), %%zmm23\nvmovaps 384(%1), %%zmm30\nvmovaps 448(%1), %%zmm31\n"
                 "kmovw (%3), %%k1\nkmovw 4(%3), %%k7\n"
                 "mov $2000, %%r8d\n1: dec %%r8d\njnz 1b\n"
                 "syscall\n"
                 "mov $2000, %%r8d\n1: dec %%r8d\njnz 1b\n"
                 "vmovaps %%zmm0, (%2)\nvmovaps %%zmm1, 64(%2)\nvmovaps %%zmm15, 128(%2)\nvmovaps %%zmm16, 192(%2)\n"
                 "vmovaps %%zmm17, 256(%2)\nvmovaps %%zmm23, 320(%2)\nvmovaps %%zmm30, 384(%2)\nvmovaps %%zmm31, 448(%2)\n"
                 "kmovw %%k1, (%3)\nkmovw %%k7, 4(%3)\n"
                 : "+a"(call)
                 : "b"(in), "d"(out), "S"(mask)
                 : "rcx", "r11", "r8", "memory", "xmm0", "xmm1", "xmm15", "xmm16", "xmm17", "xmm23", "xmm30", "xmm31", "k1", "k7");
}

static void worker(int me, int rounds) {
    struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &act, NULL);
    struct itimerval often = {{0, 3000 + me * 137}, {0, 3000}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    Line in[8], out[8];
    unsigned mxcsr = 0x1f80 | (me & 3) << 13, got;
    unsigned short word = 0x37f | (me & 3) << 10, got_word;
    long double deep = 1.0L / (me + 3), got_deep;
    for (int round = 0; round < rounds; round++) {
        for (size_t i = 0; i < sizeof in; i++)
            ((unsigned char *)in)[i] = me * 31 + round * 7 + i;
        memset(out, 0, sizeof out);
        asm volatile("ldmxcsr %0\nfninit\nfldcw %1\nfldt %2" ::"m"(mxcsr), "m"(word), "m"(deep));
        unsigned mask[2] = {(me * 977 + round) & 0xffff, (~me * 31 + round) & 0xffff}, want[2] = {mask[0], mask[1]};
        if (avx512) {
            round512(in, out, SYS_sched_yield, mask);
            CHECK(memcmp(in, out, sizeof in) == 0, "process %d round %d: zmm", me, round);
            CHECK(memcmp(mask, want, sizeof mask) == 0, "process %d round %d: masks", me, round);
        } else {
            round256(in, out, SYS_sched_yield);
            for (int i = 0; i < 8; i++)
                CHECK(memcmp(in[i], out[i], 32) == 0, "process %d round %d: ymm", me, round);
        }
        asm volatile("stmxcsr %0\nfnstcw %1\nfstpt %2" : "=m"(got), "=m"(got_word), "=m"(got_deep));
        CHECK((got & 0xffc0) == (mxcsr & 0xffc0), "process %d: mxcsr %#x", me, got);
        CHECK(got_word == word, "process %d: x87 control %#x", me, got_word);
        CHECK(got_deep == deep, "process %d: x87 top", me);
    }
    unsigned plain = 0x1f80;
    asm volatile("fninit\nldmxcsr %0" ::"m"(plain));
    CHECK(handled > 0);
    _exit(0);
}

int main(void) {
    CHECK(__builtin_cpu_supports("avx"), "no AVX");
    avx512 = __builtin_cpu_supports("avx512f") != 0;
    printf("with %s\n", avx512 ? "AVX-512" : "AVX");
    fflush(stdout);
    cpu_set_t cpu;
    CPU_ZERO(&cpu);
    CPU_SET(0, &cpu);
    CHECK(sched_setaffinity(0, sizeof cpu, &cpu) == 0);
    pid_t pid[6];
    for (int i = 0; i < 6; i++) {
        pid[i] = fork();
        if (pid[i] == 0)
            worker(i, 4000);
    }
    for (int i = 0; i < 6; i++)
        reap(pid[i]);
    return ok();
}
