/* How fast the kernels' innermost loop runs by itself, on data in the L1 cache: an upper bound for any model.
 *
 *   gcc -O3 -ffp-contract=off -Iinference/engines/native -DKERNELS='"avx2.c"' benchmarks/serving/bare_loop.c -lpthread -lm
 *   ./a.out 2        two threads; prints their best rate within a second, in billions of int8 operations per second
 *
 * A multiplication and an addition are two operations. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include KERNELS

void meet(Session *session, int threads) { (void)session, (void)threads; }

enum { INPUTS = 256, REPEATS = 2000 };
static int8_t weight[INT_VECTORS * LANES * INPUTS] __attribute__((aligned(64)));
static uint8_t activation[INT_ROWS * INPUTS];
static const int32_t weight_sum[LANES];

#ifdef FEATURES
TARGET_BEGIN(FEATURES)
#endif
static int32_t repeat_tile(void) {
    ints sum[INT_ROWS][INT_VECTORS];
    UNROLL for (int r = 0; r < INT_ROWS; r++)
        UNROLL for (int v = 0; v < INT_VECTORS; v++) sum[r][v] = i_start(weight_sum);
#ifdef CENTRED_LOOP
    static const int16_t centres[INPUTS];
    const Linear layer = {.inputs = INPUTS, .weight = weight, .weight_sum = weight_sum};
    for (int repeat = 0; repeat < REPEATS; repeat++) centred_loop(INT_ROWS, &layer, 0, centres, activation, sum);
#else
    for (int repeat = 0; repeat < REPEATS; repeat++) inner_loop(INT_ROWS, INT_VECTORS, weight, activation, INPUTS, sum);
#endif
    vec total = v_splat(0.f);
    UNROLL for (int r = 0; r < INT_ROWS; r++)
        UNROLL for (int v = 0; v < INT_VECTORS; v++) total = v_add(total, i_to_float(sum[r][v]));
    return (int32_t)v_sum(total);
}
#ifdef FEATURES
TARGET_END
#endif

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *measure(void *best) {
    const double operations = 2. * REPEATS * INPUTS * INT_ROWS * INT_VECTORS * LANES;
    volatile int32_t sink = 0;
    for (const double end = now() + 1.; now() < end;) {
        const double begin = now();
        sink += repeat_tile();
        const double rate = operations / (now() - begin);
        if (rate > *(double *)best) *(double *)best = rate;
    }
    return NULL;
}

int main(int argc, char **argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : 1;
    pthread_t thread[256];
    double best[256] = {0}, sum = 0;
    for (int i = 0; i < threads && i < 256; i++) pthread_create(&thread[i], NULL, measure, &best[i]);
    for (int i = 0; i < threads && i < 256; i++) pthread_join(thread[i], NULL), sum += best[i];
    printf("%.1f\n", sum / 1e9);
    return 0;
}
