// Many processes at once, each with its own memory, woken one by one.
#include "check.h"

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 400;
    int go[2], back[2];
    CHECK(pipe(go) == 0 && pipe(back) == 0);
    pid_t *pid = calloc(n, sizeof *pid);
    for (int i = 0; i < n; i++) {
        pid[i] = fork();
        CHECK(pid[i] >= 0, "process %d", i);
        if (pid[i] == 0) {
            volatile int *own = map(2 * PAGE, MAP_PRIVATE);
            own[0] = i;
            char c;
            CHECK(read(go[0], &c, 1) == 1);
            int me = own[0];
            CHECK(me == i && write(back[1], &me, sizeof me) == sizeof me);
            _exit(i % 128);
        }
    }
    char *seen = calloc(n, 1);
    for (int i = 0; i < n; i++) {
        CHECK(write(go[1], "x", 1) == 1);
        int who;
        CHECK(read(back[0], &who, sizeof who) == sizeof who);
        CHECK(who >= 0 && who < n && !seen[who]);
        seen[who] = 1;
    }
    for (int i = 0; i < n; i++) {
        int status;
        CHECK(waitpid(pid[i], &status, 0) == pid[i] && WIFEXITED(status) && WEXITSTATUS(status) == i % 128, "%#x", status);
    }
    return ok();
}
