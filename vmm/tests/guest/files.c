// Files on the writable layer: synced, direct, mapped, sparse, punched, renamed, sent.
#include "check.h"
#include <dirent.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

#define MIB (1UL << 20)

static uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccd;
    x ^= x >> 29;
    return x;
}

static void pattern(uint64_t *p, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        p[i] = mix(seed + i);
}

int main(void) {
    CHECK(mkdir("/root/files-of-test", 0700) == 0 || errno == EEXIST);
    CHECK(chdir("/root/files-of-test") == 0);
    uint64_t *out, *in;
    CHECK(posix_memalign((void **)&out, PAGE, MIB) == 0 && posix_memalign((void **)&in, PAGE, MIB) == 0);
    // Written, synced, read back from the device instead of the page cache.
    int fd = open("a", O_RDWR | O_CREAT | O_TRUNC, 0600);
    for (int i = 0; i < 16; i++) {
        pattern(out, MIB, i);
        CHECK(write(fd, out, MIB) == MIB);
    }
    CHECK(fsync(fd) == 0 && fdatasync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    for (int i = 15; i >= 0; i--) {
        pattern(out, MIB, i);
        CHECK(pread(fd, in, MIB, i * MIB) == MIB && memcmp(in, out, MIB) == 0, "MiB %d", i);
    }
    // Direct I/O to and from the device.
    int direct = open("a", O_RDWR | O_DIRECT);
    CHECK(direct >= 0);
    for (int i = 0; i < 16; i++) {
        pattern(out, MIB, 100 + i);
        CHECK(pwrite(direct, out, MIB, i * MIB) == MIB);
        CHECK(pread(direct, in, MIB, i * MIB) == MIB && memcmp(in, out, MIB) == 0, "MiB %d", i);
    }
    CHECK(pread(fd, in, MIB, 3 * MIB) == MIB);
    pattern(out, MIB, 103);
    CHECK(memcmp(in, out, MIB) == 0, "the page cache has data from before the direct write");
    // Shared mappings.
    uint64_t *m = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 2 * MIB);
    CHECK(m != MAP_FAILED);
    pattern(m, 4 * MIB, 500);
    CHECK(msync(m, 4 * MIB, MS_SYNC) == 0);
    CHECK(pread(direct, in, MIB, 3 * MIB) == MIB && memcmp(in, (char *)m + MIB, MIB) == 0);
    munmap(m, 4 * MIB);
    close(direct);
    close(fd);
    // Sparse: holes occupy no blocks and read as zeros.
    fd = open("sparse", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(pwrite(fd, "end", 3, 1UL << 30) == 3 && fsync(fd) == 0);
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && st.st_size == (1L << 30) + 3 && st.st_blocks < 64, "%ld blocks", st.st_blocks);
    CHECK(lseek(fd, 0, SEEK_DATA) >= (1L << 30) - 65536);
    CHECK(pread(fd, in, 4096, 512 * MIB) == 4096 && in[0] == 0 && in[511] == 0);
    CHECK(ftruncate(fd, 100) == 0 && fstat(fd, &st) == 0 && st.st_size == 100);
    // Punched and allocated ranges.
    pattern(out, MIB, 7);
    CHECK(pwrite(fd, out, MIB, 0) == MIB && fsync(fd) == 0);
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 64 << 10, 128 << 10) == 0);
    CHECK(pread(fd, in, MIB, 0) == MIB);
    CHECK(memcmp(in, out, 64 << 10) == 0 && in[8192] == 0 && in[8192 + 16383] == 0);
    CHECK(memcmp((char *)in + (192 << 10), (char *)out + (192 << 10), MIB - (192 << 10)) == 0);
    // Copied from file to file in the kernel.
    int copy = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0600);
    off_t from = 0;
    CHECK(sendfile(copy, fd, &from, MIB) == MIB);
    CHECK(pread(copy, out, MIB, 0) == MIB && memcmp(in, out, MIB) == 0);
    // Directory listings show renames and links.
    CHECK(rename("copy", "renamed") == 0 && access("copy", F_OK) == -1);
    CHECK(link("renamed", "linked") == 0 && stat("linked", &st) == 0 && st.st_nlink == 2);
    CHECK(symlink("renamed", "soft") == 0 || errno == EEXIST);
    for (int i = 0; i < 500; i++) {
        char name[32];
        snprintf(name, sizeof name, "n%d", i);
        int f = open(name, O_CREAT | O_WRONLY | O_EXCL, 0600);
        CHECK(f >= 0, "%s", name);
        close(f);
    }
    int entries = 0;
    DIR *dir = opendir(".");
    while (readdir(dir))
        entries++;
    closedir(dir);
    CHECK(entries == 500 + 2 + 5, "%d entries", entries);
    // A replaced executable runs the new code.
    CHECK(system("cp /bin/true x && ./x && cp /bin/false y && mv y x && ! ./x") == 0);
    // Appends by several processes do not overlap.
    for (int p = 0; p < 4; p++)
        if (fork() == 0) {
            int f = open("log", O_WRONLY | O_CREAT | O_APPEND, 0600);
            char line[17];
            for (int i = 0; i < 500; i++) {
                snprintf(line, sizeof line, "%d %013d\n", p, i);
                CHECK(write(f, line, 16) == 16);
            }
            _exit(0);
        }
    for (int p = 0; p < 4; p++)
        reap(-1);
    CHECK(stat("log", &st) == 0 && st.st_size == 4 * 500 * 16);
    CHECK(syncfs(fd) == 0);
    CHECK(chdir("/") == 0 && system("rm -r /root/files-of-test") == 0);
    return ok();
}
