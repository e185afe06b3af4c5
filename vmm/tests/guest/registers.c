// Random stores to the devices' register page through /dev/mem.   registers ADDRESS SEED
#include "check.h"

int main(int argc, char **argv) {
    CHECK(argc == 3);
    int fd = open("/dev/mem", O_RDWR | O_SYNC);
    if (fd < 0) {
        puts("not allowed");
        return 0;
    }
    volatile uint8_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, strtoull(argv[1], NULL, 0));
    if (page == MAP_FAILED) {
        puts("not allowed");
        return 0;
    }
    unsigned seed = atoi(argv[2]);
    for (int i = 0; i < 20000; i++) {
        unsigned at = rand_r(&seed) % PAGE, value = rand_r(&seed) * 31;
        // Mostly what virtio-mmio knows: queue selection, sizes, addresses, ready, notify, status.
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
    return ok();
}
