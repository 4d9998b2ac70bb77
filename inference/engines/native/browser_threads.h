/* The part of POSIX threads that kernels.c uses, for a browser. Threads are workers there, which the page starts: each
 * shares the memory and calls run_thread with its number. Without shared memory there are none. */
#pragma once
#include <stdint.h>

typedef int32_t pthread_t, pthread_mutex_t, pthread_cond_t;

#ifdef __wasm_atomics__
enum { MOST_THREADS = 16 };
static struct {
    void *(*run)(void *);
    void *argument;
} threads[MOST_THREADS];
static int num_threads;

void run_thread(int32_t number) { threads[number].run(threads[number].argument); }

static int pthread_create(pthread_t *thread, const void *attributes, void *(*run)(void *), void *argument) {
    (void)attributes;
    if (num_threads == MOST_THREADS) return 1;
    *thread = num_threads++;
    threads[*thread].run = run;
    threads[*thread].argument = argument;
    return 0;
}

static void wait_while(int32_t *place, int32_t value, int64_t nanoseconds) {
    __builtin_wasm_memory_atomic_wait32(place, value, nanoseconds);
}

static void wake_one(int32_t *place) { __builtin_wasm_memory_atomic_notify(place, 1); }
#else
static int pthread_create(pthread_t *thread, const void *attributes, void *(*run)(void *), void *argument) {
    (void)thread, (void)attributes, (void)run, (void)argument;
    return 1;
}
static void wait_while(int32_t *place, int32_t value, int64_t nanoseconds) {
    (void)place, (void)value, (void)nanoseconds;
}
static void wake_one(int32_t *place) { (void)place; }
#endif

enum { FOREVER = -1, YIELD_NANOSECONDS = 20000 };

static void pthread_mutex_lock(pthread_mutex_t *is_locked) {
    while (__atomic_exchange_n(is_locked, 1, __ATOMIC_SEQ_CST)) wait_while(is_locked, 1, FOREVER);
}

static void pthread_mutex_unlock(pthread_mutex_t *is_locked) {
    __atomic_store_n(is_locked, 0, __ATOMIC_SEQ_CST);
    wake_one(is_locked);
}

/* A condition is the count of its signals. */
static void pthread_cond_wait(pthread_cond_t *signals, pthread_mutex_t *mutex) {
    const int32_t seen = __atomic_load_n(signals, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(mutex);
    wait_while(signals, seen, FOREVER);
    pthread_mutex_lock(mutex);
}

static void pthread_cond_signal(pthread_cond_t *signals) {
    __atomic_fetch_add(signals, 1, __ATOMIC_SEQ_CST);
    wake_one(signals);
}

static void sched_yield(void) {
    static int32_t unchanged;
    wait_while(&unchanged, 0, YIELD_NANOSECONDS);
}

static void pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes) { (void)attributes, *mutex = 0; }
static void pthread_cond_init(pthread_cond_t *signals, const void *attributes) { (void)attributes, *signals = 0; }
static void pthread_mutex_destroy(pthread_mutex_t *mutex) { (void)mutex; }
static void pthread_cond_destroy(pthread_cond_t *signals) { (void)signals; }
static void pthread_join(pthread_t thread, void **result) { (void)thread, (void)result; } /* ends with its worker */
