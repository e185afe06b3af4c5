// Threads: each has its own thread-local storage, locks exclude, many start and end.
#include "check.h"

#define THREADS 40
static __thread uint64_t own[64] = {42};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static long counter;
static int next;

static void *work(void *arg) {
    uint64_t me = (uintptr_t)arg;
    CHECK(own[0] == 42 && own[63] == 0);
    for (int i = 0; i < 64; i++)
        own[i] = me * 1000 + i;
    for (int i = 0; i < 500; i++) {
        pthread_mutex_lock(&lock);
        counter++;
        pthread_mutex_unlock(&lock);
        if (i % 10 == 0)
            sched_yield();
        CHECK(own[i % 64] == me * 1000 + i % 64, "thread %lu sees another's storage", me);
    }
    // In turns, by a condition variable.
    for (int round = 0; round < 5; round++) {
        pthread_mutex_lock(&lock);
        while (next != round * THREADS + (int)me)
            pthread_cond_wait(&turn, &lock);
        next++;
        pthread_cond_broadcast(&turn);
        pthread_mutex_unlock(&lock);
    }
    return (void *)(me + 1);
}

static void *brief(void *arg) {
    errno = (int)(uintptr_t)arg;
    sched_yield();
    CHECK(errno == (int)(uintptr_t)arg);
    return arg;
}

int main(void) {
    pthread_t thread[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&thread[i], NULL, work, (void *)i) == 0);
    for (uintptr_t i = 0; i < THREADS; i++) {
        void *result;
        CHECK(pthread_join(thread[i], &result) == 0 && result == (void *)(i + 1));
    }
    CHECK(counter == THREADS * 500L, "%ld", counter);
    CHECK(own[0] == 42);
    for (uintptr_t i = 1; i < 1000; i++) {
        void *result;
        CHECK(pthread_create(&thread[0], NULL, brief, (void *)i) == 0);
        CHECK(pthread_join(thread[0], &result) == 0 && result == (void *)i);
    }
    return ok();
}
