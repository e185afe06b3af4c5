// Random stores to the devices' register page, through /dev/mem or, if the kernel does not allow that, through a
// page-table entry that the monitor makes: user code can call the monitor just as the kernel does.
//   registers ADDRESS SEED MONITOR
#include "check.h"

#define UPDATE_VA_MAPPING 14

// A hypercall like that of the kernel's rewritten site.
static long hypercall(uint64_t entry, uint64_t number, uint64_t a, uint64_t b, uint64_t c) {
    long result = number;
    asm volatile("lea 1f(%%rip), %%r11\n"
                 "sub $128, %%rsp\n"
                 "push %%r11\npush %%rcx\npush %%r11\n"
                 "jmp *%%rcx\n"
                 "1: add $128, %%rsp\n"
                 : "+a"(result), "+D"(a), "+S"(b), "+d"(c), "+c"(entry)
                 :
                 : "r8", "r9", "r10", "r11", "memory");
    return result;
}

static volatile uint8_t *register_page(uint64_t address, uint64_t monitor) {
    int fd = open("/dev/mem", O_RDWR | O_SYNC);
    volatile uint8_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, address);
    if (page != MAP_FAILED)
        return page;
    page = map(PAGE, MAP_PRIVATE);
    page[0] = 1;
    uint64_t *header = (uint64_t *)monitor;
    CHECK(memcmp(header, "MONITOR3", 8) == 0);
    // Present, writable, user, uncached; flush the translation.
    long result = hypercall(header[2], UPDATE_VA_MAPPING, (uint64_t)page, address | 0x17, 2);
    CHECK(result == 0, "the monitor returned %ld", result);
    // Magic value of virtio-mmio.
    CHECK(*(volatile uint32_t *)page == 0x74726976, "%#x", *(volatile uint32_t *)page);
    return page;
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    volatile uint8_t *page = register_page(strtoull(argv[1], NULL, 0), strtoull(argv[3], NULL, 0));
    puts("reached");
    fflush(stdout);
    unsigned seed = atoi(argv[2]);
    for (int i = 0; i < 20000; i++) {
        unsigned at = rand_r(&seed) % PAGE, value = rand_r(&seed) * 31;
        // Mostly registers of virtio-mmio: queue selection, sizes, addresses, ready, notify, status.
        static const unsigned known[] = {0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4};
        if (i % 4)
            at = rand_r(&seed) % 5 * 0x200 + known[rand_r(&seed) % 15];
        switch (rand_r(&seed) % 8) {
        case 0:
            page[at] = value;
            break;
        case 1:
            *(volatile uint16_t *)(page + at % (PAGE - 2)) = value;
            break;
        case 2:
            *(volatile uint64_t *)(page + at % (PAGE - 8)) = (uint64_t)value << 32 | value;
            break;
        case 3:
            *(volatile uint32_t *)(page + (at & ~3u)) = value % 16;
            break;
        default:
            *(volatile uint32_t *)(page + (at & ~3u)) = value;
        }
    }
    puts("ok");
    fflush(stdout);
    // The kernel must not treat this page as one of its own.
    for (;;)
        pause();
}
