// Causes page faults continuously until the file "stop" exists. Every read must return the value that was written last.
#include "check.h"

#define PAGES 64UL

static void fill_and_look(uint64_t round) {
    uint64_t *p = map(PAGES * PAGE, MAP_PRIVATE);
    for (size_t i = 0; i < PAGES; i++) {
        uint64_t *word = p + i * PAGE / sizeof(*p);
        CHECK(*word == 0, "round %lu page %zu", round, i);
        *word = round * PAGES + i;
    }
    for (size_t i = 0; i < PAGES; i++)
        CHECK(p[i * PAGE / sizeof(*p)] == round * PAGES + i, "round %lu page %zu", round, i);
    CHECK(munmap(p, PAGES * PAGE) == 0);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    for (uint64_t round = 1; access(argv[1], F_OK) != 0; round++)
        fill_and_look(round);
    return ok();
}
