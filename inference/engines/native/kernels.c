/* The threads that run a model, and the choice of the instruction set. The computation itself is in encoder.h.
 *
 * Source: quantisation by row, Yao et al. 2022, "ZeroQuant" (arXiv:2206.01861), section 3.1.
 */
#ifdef FOR_BROWSERS
#include "browser_threads.h"
#else
#include <pthread.h>
#include <sched.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "model.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define EXPORT __attribute__((visibility("default")))

/* WebAssembly has no instruction to pause for, so a spin takes a nanosecond instead of a dozen. */
#ifdef __wasm__
enum { SPINS_BEFORE_YIELD = 100000 };
#else
enum { SPINS_BEFORE_YIELD = 4000 };
#endif
enum { ALIGNMENT = 64 };

/* ---------------------------------------------------------------- instruction sets */

#if defined(__x86_64__)
RunShare run_share_avx512_vnni, run_share_avx512, run_share_avx_vnni, run_share_avx2;
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static int has_avx_vnni(void) { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static int has_avx512_vnni(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#elif defined(__aarch64__)
RunShare run_share_neon_i8mm, run_share_neon_dotprod, run_share_neon;
static int has_neon(void) { return 1; }
#if defined(__linux__)
static int has_dotprod(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
static int has_i8mm(void) { return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }
#elif defined(__APPLE__)
static int has(const char *feature) {
    int32_t value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, NULL, 0) == 0 && value;
}
static int has_dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has("hw.optional.arm.FEAT_I8MM"); }
#else
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif
#elif defined(__wasm_simd128__)
RunShare run_share_wasm_dot, run_share_wasm_relaxed, run_share_wasm;
#endif
RunShare run_share_plain;
static int always(void) { return 1; }

/* The fastest first. A module for browsers has only one kind of SIMD, and tries all that it has (local_worker.js). */
static const struct {
    const char *name;
    int (*runs_here)(void);
    RunShare *run_share;
} instruction_sets[] = {
#if defined(__x86_64__)
    {"avx512_vnni", has_avx512_vnni, run_share_avx512_vnni},
    {"avx_vnni", has_avx_vnni, run_share_avx_vnni},
    {"avx512", has_avx512, run_share_avx512},
    {"avx2", has_avx2, run_share_avx2},
#elif defined(__aarch64__)
    {"neon_i8mm", has_i8mm, run_share_neon_i8mm},
    {"neon_dotprod", has_dotprod, run_share_neon_dotprod},
    {"neon", has_neon, run_share_neon},
#elif defined(__wasm_relaxed_simd__) && defined(FOR_BROWSERS)
    {"wasm_dot", always, run_share_wasm_dot},
    {"wasm_relaxed", always, run_share_wasm_relaxed},
#elif defined(__wasm_simd128__)
#ifdef __wasm_relaxed_simd__
    {"wasm_relaxed", always, run_share_wasm_relaxed},
#endif
    {"wasm", always, run_share_wasm},
#endif
#ifndef FOR_BROWSERS
    {"plain", always, run_share_plain},
#endif
};

/* The name of the index-th instruction set that this processor has, the fastest first; NULL beyond the last. */
EXPORT const char *instruction_set(int32_t index) {
    for (size_t i = 0; i < sizeof(instruction_sets) / sizeof(*instruction_sets); i++)
        if (instruction_sets[i].runs_here() && index-- == 0) return instruction_sets[i].name;
    return NULL;
}

/* NULL if this processor has no such instruction set. */
static RunShare *run_share_of(const char *name) {
    for (size_t i = 0; i < sizeof(instruction_sets) / sizeof(*instruction_sets); i++)
        if (!strcmp(instruction_sets[i].name, name) && instruction_sets[i].runs_here()) return instruction_sets[i].run_share;
    return NULL;
}

/* ---------------------------------------------------------------- rotary positions */

/* Cosine and sine of 0 <= x < 10^6 in double precision, from arithmetic only: libraries differ in the last bit. */
static void cosine_sine(double x, double *cosine, double *sine) {
    const double quarters = (double)(int64_t)(x * 0.63661977236758134 + 0.5);
    /* x minus so many quarters of a circle; the first part of pi / 2 has 33 bits, so that its product is exact. */
    const double r = (x - quarters * 1.57079632673412561417e+00) - quarters * 6.07710050650619224932e-11, s = r * r;
    double c = 1., d = 1.;
    for (int i = 16; i > 0; i -= 2) {
        c = 1. - c * s / (i * (i - 1));
        d = 1. - d * s / (i * (i + 1));
    }
    d *= r;
    switch ((int64_t)quarters & 3) {
    case 0: *cosine = c, *sine = d; break;
    case 1: *cosine = -d, *sine = c; break;
    case 2: *cosine = -c, *sine = -d; break;
    default: *cosine = d, *sine = -c;
    }
}

/* Fills rotation (positions, 2 half) with the cosines and sines of position x frequency. */
EXPORT void fill_rotation(const float *frequencies, int32_t half, int32_t positions, float *rotation) {
    for (int32_t position = 0; position < positions; position++)
        for (int32_t i = 0; i < half; i++) {
            double cosine, sine;
            cosine_sine((float)position * frequencies[i], &cosine, &sine);
            rotation[(size_t)position * 2 * half + i] = (float)cosine;
            rotation[(size_t)position * 2 * half + half + i] = (float)sine;
        }
}

/* ---------------------------------------------------------------- centres */

/* Without VNNI products are summed in int16, and widening such a sum to int32 costs as much as a multiplication. Four
 * products always fit, so that inner_loop widens once per 8 inputs. For once per 32 inputs, 16 products have to fit.
 *
 * An activation q is 0 to 182, so sum(q w) is at most 91 sum(|w|) away from its centre, 91 sum(w). A sum that starts at
 * -91 sum(w) ends within 91 sum(|w|) of zero (on the way it may wrap around, which does no harm), and that fits if
 * sum(|w|) <= 360. So it is for 98% of the strips of 16 outputs of trained models; the others get no centres. What the
 * total of an output then lacks is 91 x its weight_sum.
 *
 * An output has two sums in int16, each of one pair out of every four inputs. */
EXPORT void fill_centres(const int8_t *weight, int32_t outputs, int32_t inputs, int16_t *centres) {
    enum { BYTES = 4 * LANES };
    const size_t strip = (size_t)inputs / CENTRED * BYTES / 2;
    for (int32_t output = 0; output < outputs; output += LANES, centres += strip) {
        int16_t largest = 0;
        for (size_t at = 0; at < strip; at += BYTES / 2) {
            int16_t sum[BYTES] = {0}, size[BYTES] = {0};
            for (int k = 0; k < CENTRED; k += 4, weight += BYTES)
                for (int i = 0; i < BYTES; i++) {
                    sum[i] += weight[i];
                    size[i] += weight[i] < 0 ? -weight[i] : weight[i];
                }
            for (int i = 0; i < BYTES; i += 2) {
                const int16_t both = size[i] + size[i + 1];
                centres[at + i / 2] = (int16_t)(-ACTIVATION_CENTRE * (sum[i] + sum[i + 1]));
                largest = both > largest ? both : largest;
            }
        }
        if (ACTIVATION_CENTRE * largest > INT16_MAX) centres[0] = NO_CENTRES;
    }
}

/* ---------------------------------------------------------------- threads */

/* A thread of the pool. It sleeps until a call takes it, and spins while it waits for the other threads of that call. */
typedef struct Helper {
    pthread_t thread;
    struct Helper *next;  /* in the list of idle helpers, or of the call that has taken it */
    Scratch scratch;
    pthread_mutex_t mutex;  /* guards what follows: its share of the call that has taken it */
    pthread_cond_t wake;
    uint64_t calls;
    Session *session;
    const Batch *batch;
    int32_t place, threads, stopping;
} Helper;

/* The helpers that all sessions of a model share: a call takes those that are idle, however few. */
typedef struct Pool {
    const Model *model;
    RunShare *run_share;
    pthread_mutex_t mutex; /* guards the list of idle helpers; only callers take it */
    Helper *idle;
    int32_t helpers;
    Helper helper[];
} Pool;

/* Leaves the core's units to the other hardware thread of the core. */
INLINE void pause_spinning(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* All threads of a call meet here. */
void meet(Session *s, int threads) {
    if (threads == 1) return;
    const int32_t generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) == threads - 1) {
        atomic_store(&s->arrived, 0);
        atomic_fetch_add(&s->generation, 1);
        return;
    }
    for (int spins = 0; atomic_load(&s->generation) == generation; spins++) {
        if (spins < SPINS_BEFORE_YIELD) pause_spinning();
        else sched_yield();
    }
}

/* ---------------------------------------------------------------- sessions */

static void *grown(void *old, size_t bytes) {
    free(old);
    return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static int reserve_rows(Session *s, int rows) {
    if (rows <= s->row_capacity) return 1;
    const size_t width = s->model->width;
    s->row_capacity = 0;
    s->hidden = grown(s->hidden, rows * width * sizeof(float));
    s->quantised = grown(s->quantised, rows * width);
    s->scales = grown(s->scales, rows * sizeof(RowScale));
    s->query = grown(s->query, rows * width * sizeof(float));
    for (int i = 0; i < 2; i++) s->key_value[i] = grown(s->key_value[i], rows * 2 * width * sizeof(float));
    if (!s->hidden || !s->quantised || !s->scales || !s->query || !s->key_value[0] || !s->key_value[1]) return 0;
    s->row_capacity = rows;
    return 1;
}

static int reserve_texts(Session *s, int texts) {
    if (texts <= s->text_capacity) return 1;
    const size_t width = s->model->width;
    s->text_capacity = 0;
    s->first = grown(s->first, texts * width * sizeof(float));
    s->pooled = grown(s->pooled, texts * width * sizeof(float));
    s->first_quantised = grown(s->first_quantised, texts * width);
    s->first_scales = grown(s->first_scales, texts * sizeof(RowScale));
    if (!s->first || !s->pooled || !s->first_quantised || !s->first_scales) return 0;
    s->text_capacity = texts;
    return 1;
}

static int reserve_scratch(Scratch *c, const Model *m, int longest) {
    if (longest <= c->longest) return 1;
    const size_t width = m->width, wide = m->wide > m->embedding_width ? m->wide : m->embedding_width;
    const size_t padded = (longest + LANES - 1) / LANES * LANES;
    c->longest = 0;
    c->wide = grown(c->wide, MOST_ROWS * wide * sizeof(float));
    c->scores = grown(c->scores, MOST_ROWS * padded * sizeof(float));
    c->keys = grown(c->keys, width / m->heads * padded * sizeof(float));
    c->row = grown(c->row, MOST_ROWS * sizeof(float));
    c->quantised = grown(c->quantised, MOST_ROWS * (wide > width ? wide : width));
    c->scales = grown(c->scales, MOST_ROWS * sizeof(RowScale));
    if (!c->wide || !c->scores || !c->keys || !c->row || !c->quantised || !c->scales) return 0;
    c->longest = longest;
    return 1;
}

static void free_scratch(Scratch *c) {
    free(c->wide), free(c->scores), free(c->keys), free(c->row), free(c->quantised), free(c->scales);
}

/* ---------------------------------------------------------------- helpers */

static void *help(void *argument) {
    Helper *h = argument;
    for (uint64_t done = 0;;) {
        pthread_mutex_lock(&h->mutex);
        while (!h->stopping && h->calls == done) pthread_cond_wait(&h->wake, &h->mutex);
        done = h->calls;
        const int stopping = h->stopping;
        pthread_mutex_unlock(&h->mutex);
        if (stopping) return NULL;
        h->session->pool->run_share(h->session, h->batch, &h->scratch, h->place, h->threads);
    }
}

/* Take up to `wanted` idle helpers for a call. */
static Helper *take_helpers(Pool *pool, int wanted, int *taken) {
    Helper *team = NULL;
    *taken = 0;
    pthread_mutex_lock(&pool->mutex);
    while (*taken < wanted && pool->idle) {
        Helper *h = pool->idle;
        pool->idle = h->next;
        h->next = team;
        team = h;
        ++*taken;
    }
    pthread_mutex_unlock(&pool->mutex);
    return team;
}

static void start_helpers(Helper *team, Session *s, const Batch *batch, int threads) {
    int place = 1;
    for (Helper *h = team; h; h = h->next) {
        pthread_mutex_lock(&h->mutex);
        h->session = s, h->batch = batch, h->place = place++, h->threads = threads;
        h->calls++;
        pthread_mutex_unlock(&h->mutex);
        pthread_cond_signal(&h->wake);
    }
}

/* For the caller, after the last meeting of its call. The next call finds these helpers idle, even one that has not gone
 * to sleep yet: the number of its calls tells that helper that it is needed again. */
static void return_helpers(Pool *pool, Helper *team) {
    if (!team) return;
    Helper *last = team;
    while (last->next) last = last->next;
    pthread_mutex_lock(&pool->mutex);
    last->next = pool->idle;
    pool->idle = team;
    pthread_mutex_unlock(&pool->mutex);
}

/* Stops the helpers; no call may be in progress, and none may follow. The caller closes the sessions, after their pool,
 * because a helper may still be leaving the last meeting of a call. */
EXPORT void close_pool(Pool *pool) {
    for (int i = 0; i < pool->helpers; i++) {
        Helper *h = &pool->helper[i];
        pthread_mutex_lock(&h->mutex);
        h->stopping = 1;
        pthread_mutex_unlock(&h->mutex);
        pthread_cond_signal(&h->wake);
    }
    for (int i = 0; i < pool->helpers; i++) {
        Helper *h = &pool->helper[i];
        pthread_join(h->thread, NULL);
        pthread_cond_destroy(&h->wake);
        pthread_mutex_destroy(&h->mutex);
        free_scratch(&h->scratch);
    }
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

/* Starts `helpers` threads, which the sessions of one model share; fewer if the system refuses some. NULL if memory runs
 * out, or if this processor does not have the instruction set of that name. */
EXPORT Pool *open_pool(const Model *model, int32_t helpers, const char *instructions) {
    RunShare *run_share = run_share_of(instructions);
    if (!run_share) return NULL;
    Pool *pool = calloc(1, sizeof(Pool) + (size_t)(helpers > 0 ? helpers : 0) * sizeof(Helper));
    if (!pool) return NULL;
    pool->model = model;
    pool->run_share = run_share;
    pthread_mutex_init(&pool->mutex, NULL);
    for (int i = 0; i < helpers; i++) {
        Helper *h = &pool->helper[i];
        pthread_mutex_init(&h->mutex, NULL);
        pthread_cond_init(&h->wake, NULL);
        if (pthread_create(&h->thread, NULL, help, h)) break;
        h->next = pool->idle;
        pool->idle = h;
        pool->helpers = i + 1;
    }
    return pool;
}

/* ---------------------------------------------------------------- calls */

EXPORT void close_session(Session *s) {
    free(s->hidden), free(s->quantised), free(s->scales), free(s->query), free(s->key_value[0]), free(s->key_value[1]);
    free(s->first), free(s->pooled), free(s->first_quantised), free(s->first_scales);
    free_scratch(&s->scratch);
    free(s);
}

/* For the Python side, to see that both mean the same structures. */
EXPORT int32_t model_bytes(void) { return sizeof(Model); }

/* A session serves one call at a time; NULL when memory is lacking. */
EXPORT Session *open_session(Pool *pool) {
    Session *s = calloc(1, sizeof(Session));
    if (!s) return NULL;
    s->pool = pool;
    s->model = pool->model;
    return s;
}

/* Fills logits (texts, labels); returns 0, or 1 when memory is lacking. ids and starts are trusted: checked above. */
EXPORT int32_t forward(Session *s, const int32_t *ids, const int32_t *starts, int32_t texts, int32_t threads, float *logits) {
    const int rows = starts[texts];
    int longest = 0;
    for (int t = 0; t < texts; t++)
        if (starts[t + 1] - starts[t] > longest) longest = starts[t + 1] - starts[t];
    if (!reserve_rows(s, rows) || !reserve_texts(s, texts) || !reserve_scratch(&s->scratch, s->model, longest)) return 1;
    /* Every thread reads all weights, whatever its rows: beyond one thread a tile of rows more threads only read more. */
    const int tiles = (rows + 5) / 6, useful = tiles > 2 ? tiles : 2;
    int helpers = 0, fits = 1;
    Helper *team = threads > 1 ? take_helpers(s->pool, (threads < useful ? threads : useful) - 1, &helpers) : NULL;
    for (Helper *h = team; h; h = h->next) fits = fits && reserve_scratch(&h->scratch, s->model, longest);
    if (fits) {
        const Batch batch = {ids, starts, texts, logits};
        if (team) start_helpers(team, s, &batch, helpers + 1);
        s->pool->run_share(s, &batch, &s->scratch, 0, helpers + 1);
    }
    return_helpers(s->pool, team);
    return !fits;
}
