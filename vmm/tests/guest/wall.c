// Prints the wall clock in nanoseconds.
#include "check.h"

int main(void) {
    printf("%lu\n", now_ns(CLOCK_REALTIME));
    return 0;
}
