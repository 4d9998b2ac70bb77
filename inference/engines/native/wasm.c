/* WebAssembly: a register holds 4 floats or 16 bytes, so that four make one step. A browser refuses a whole module for
 * one instruction that it does not know, so relaxed SIMD needs a module of its own.
 *
 * Plain SIMD has no fused multiply-add. Logits differ by less than 1e-5 from those of the other files, unless the
 * difference rounds an activation to the next step of int8, as it does in some texts: then by what such a step changes.
 * Relaxed SIMD fuses if the processor can (x86 since 2013, ARM), and then gives the same bits as the other files. */
#if defined(__wasm_simd128__)
#include <wasm_simd128.h>

#include "model.h"

#if defined(WITH_DOT)
#define RUN_SHARE run_share_wasm_dot
#elif defined(WITH_RELAXED)
#define RUN_SHARE run_share_wasm_relaxed
#else
#define RUN_SHARE run_share_wasm
#endif

/* V8 leaves 15 registers on x86: ten sums, of five rows and eight outputs, and what is multiplied. Plain SIMD widens its
 * inputs for several steps of outputs. */
#ifdef WITH_RELAXED
enum { INT_ROWS = 5, INT_VECTORS = 1, FLOAT_ROWS = 2, FLOAT_VECTORS = 1 };
#else
enum { INT_ROWS = 5, INT_VECTORS = 3, FLOAT_ROWS = 2, FLOAT_VECTORS = 1 };
#endif

typedef struct {
    v128_t val[4];
} vec, ints;

#define EACH(TYPE, NAME, ARGUMENTS, QUARTER)                     \
    INLINE TYPE NAME ARGUMENTS {                                 \
        TYPE y;                                                  \
        UNROLL for (int i = 0; i < 4; i++) y.val[i] = (QUARTER); \
        return y;                                                \
    }
EACH(vec, v_load, (const float *p), wasm_v128_load(p + 4 * i))
EACH(vec, v_splat, (float x), wasm_f32x4_splat(x))
EACH(vec, v_add, (vec a, vec b), wasm_f32x4_add(a.val[i], b.val[i]))
EACH(vec, v_sub, (vec a, vec b), wasm_f32x4_sub(a.val[i], b.val[i]))
EACH(vec, v_mul, (vec a, vec b), wasm_f32x4_mul(a.val[i], b.val[i]))
EACH(vec, v_div, (vec a, vec b), wasm_f32x4_div(a.val[i], b.val[i]))
EACH(vec, v_sqrt, (vec x), wasm_f32x4_sqrt(x.val[i]))
EACH(vec, v_round, (vec x), wasm_f32x4_nearest(x.val[i]))
#ifdef WITH_RELAXED
EACH(vec, v_fma, (vec a, vec b, vec c), wasm_f32x4_relaxed_madd(a.val[i], b.val[i], c.val[i]))
EACH(vec, v_fnma, (vec a, vec b, vec c), wasm_f32x4_relaxed_nmadd(a.val[i], b.val[i], c.val[i]))
#else
EACH(vec, v_fma, (vec a, vec b, vec c), wasm_f32x4_add(c.val[i], wasm_f32x4_mul(a.val[i], b.val[i])))
EACH(vec, v_fnma, (vec a, vec b, vec c), wasm_f32x4_sub(c.val[i], wasm_f32x4_mul(a.val[i], b.val[i])))
#endif
/* pmax(b, a) is b < a ? a : b. */
INLINE v128_t max_4(v128_t a, v128_t b) { return wasm_f32x4_pmax(b, a); }
INLINE v128_t min_4(v128_t a, v128_t b) { return wasm_f32x4_pmin(b, a); }
EACH(vec, v_max, (vec a, vec b), max_4(a.val[i], b.val[i]))
EACH(vec, v_min, (vec a, vec b), min_4(a.val[i], b.val[i]))
INLINE void v_store(float *p, vec x) {
    UNROLL for (int i = 0; i < 4; i++) wasm_v128_store(p + 4 * i, x.val[i]);
}

INLINE v128_t power_of_2(v128_t n) {
    return wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(127)), 23);
}
EACH(vec, v_scale, (vec x, vec n), wasm_f32x4_mul(x.val[i], power_of_2(n.val[i])))

INLINE v128_t select_4(int from, int to, v128_t a, v128_t b) {
    const v128_t lane = wasm_i32x4_make(0, 1, 2, 3);
    const v128_t from_on = wasm_i32x4_ge(lane, wasm_i32x4_splat(from));
    const v128_t before = wasm_i32x4_lt(lane, wasm_i32x4_splat(to));
    return wasm_v128_bitselect(a, b, wasm_v128_and(from_on, before));
}
EACH(vec, v_select, (int from, int to, vec a, vec b), select_4(from - 4 * i, to - 4 * i, a.val[i], b.val[i]))

/* 8 + 8 lanes, then 4 + 4, 2 + 2, 1 + 1. */
#define FOLD(NAME, OP)                                                 \
    INLINE float NAME(vec x) {                                         \
        v128_t y = OP(OP(x.val[0], x.val[2]), OP(x.val[1], x.val[3])); \
        y = OP(y, wasm_i32x4_shuffle(y, y, 2, 3, 0, 1));               \
        y = OP(y, wasm_i32x4_shuffle(y, y, 1, 0, 3, 2));               \
        return wasm_f32x4_extract_lane(y, 0);                          \
    }
FOLD(v_sum, wasm_f32x4_add)
FOLD(v_largest, max_4)
FOLD(v_smallest, min_4)

/* The bits of a float16, moved into a float's place, are 2^-112 of its value, except for infinity and NaN, which no
 * exported model has. */
INLINE v128_t load_half_4(const uint16_t *p) {
    const v128_t h = wasm_u32x4_load16x4(p);
    const v128_t bits = wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x7fff)), 13);
    const v128_t size = wasm_f32x4_mul(bits, wasm_f32x4_splat(0x1p112f));
    return wasm_v128_or(size, wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x8000)), 16));
}
EACH(vec, v_load_half, (const uint16_t *p), load_half_4(p + 4 * i))
INLINE v128_t rounded(v128_t x) { return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(x)); }
/* The relaxed dot product multiplies signed bytes with bytes of 0 to 127, so activations get CENTRE less. Then four
 * products still fit into int16, and every processor gives the same sum. */
#ifdef WITH_RELAXED
enum { CENTRE = ACTIVATION_MAX / 2 };
_Static_assert(4 * CENTRE * 2 * WEIGHT_MAX <= INT16_MAX, "four products must fit into int16");
#else
enum { CENTRE = 0 };
#endif
INLINE void v_store_bytes(uint8_t *p, vec x) {
    v128_t low = wasm_i16x8_narrow_i32x4(rounded(x.val[0]), rounded(x.val[1]));
    v128_t high = wasm_i16x8_narrow_i32x4(rounded(x.val[2]), rounded(x.val[3]));
    wasm_v128_store(p, wasm_i8x16_sub(wasm_u8x16_narrow_i16x8(low, high), wasm_i8x16_splat(CENTRE)));
}

EACH(vec, i_to_float, (ints x), wasm_f32x4_convert_i32x4(x.val[i]))
EACH(ints, i_load, (const int32_t *p), wasm_v128_load(p + 4 * i))

/* LLVM would reorder the loops and spill the sums. */
#define KEEP(SUM) __asm__ volatile("" : "+r"(SUM))
#define OWN_INNER_LOOP
#define ANY_HEIGHT
#ifdef WITH_RELAXED
/* Weights get 45 more, so that none is negative. What is computed is
 *   sum (q - CENTRE) (w + 45) = sum q w - CENTRE sum w + 45 sum (q - CENTRE)
 * The middle term is what sums begin with; the last is one number for each row. */
EACH(ints, i_start, (const int32_t *sum), wasm_i32x4_mul(wasm_v128_load(sum + 4 * i), wasm_i32x4_splat(CENTRE)))

#define ROW_SUM
INLINE int32_t row_sum(const uint8_t *q, int width) {
    v128_t sum = wasm_i32x4_splat(0);
    for (int k = 0; k < width; k += 16) {
        const v128_t pairs = wasm_i16x8_extadd_pairwise_i8x16(wasm_v128_load(q + k));
        sum = wasm_i32x4_add(sum, wasm_i32x4_extadd_pairwise_i16x8(pairs));
    }
    return wasm_i32x4_extract_lane(sum, 0) + wasm_i32x4_extract_lane(sum, 1) + wasm_i32x4_extract_lane(sum, 2) +
           wasm_i32x4_extract_lane(sum, 3);
}
EACH(ints, row_start, (ints start, int32_t sum), wasm_i32x4_sub(start.val[i], wasm_i32x4_splat(WEIGHT_MAX * sum)))

INLINE v128_t raised(v128_t w) { return wasm_i8x16_add(w, wasm_i8x16_splat(WEIGHT_MAX)); }
#ifdef FOR_BROWSERS
#ifndef WITH_DOT
/* Once, instead of in every pass. */
void prepare_weights(int8_t *weights, int32_t bytes) {
    for (int32_t i = 0; i < bytes; i += 16) wasm_v128_store(weights + i, raised(wasm_v128_load(weights + i)));
}
#endif
INLINE v128_t load_weights(const int8_t *p) { return wasm_v128_load(p); }
#else
INLINE v128_t load_weights(const int8_t *p) { return raised(wasm_v128_load(p)); }
#endif

/* Adds the products of all inputs to the sums of `rows` rows and eight outputs. */
INLINE void add_products(const int rows, const int8_t *weight, const uint8_t *q, int inputs, v128_t sum[][2]) {
#ifdef WITH_DOT
    for (int k = 0; k < inputs; k += 4) {
        v128_t w[2];
        UNROLL for (int i = 0; i < 2; i++) w[i] = load_weights(weight + k * LANES + 16 * i);
        UNROLL for (int r = 0; r < rows; r++) {
            const v128_t x = wasm_v128_load32_splat(q + (size_t)r * inputs + k);
            UNROLL for (int i = 0; i < 2; i++) {
                sum[r][i] = wasm_i32x4_relaxed_dot_i8x16_i7x16_add(x, w[i], sum[r][i]);
                KEEP(sum[r][i]);
            }
        }
    }
#else
    for (int k = 0; k < inputs; k += 8) {
        v128_t w[2], next_w[2];
        UNROLL for (int i = 0; i < 2; i++) {
            w[i] = load_weights(weight + k * LANES + 16 * i);
            next_w[i] = load_weights(weight + (k + 4) * LANES + 16 * i);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const v128_t x = wasm_v128_load32_splat(q + (size_t)r * inputs + k);
            const v128_t next_x = wasm_v128_load32_splat(q + (size_t)r * inputs + k + 4);
            UNROLL for (int i = 0; i < 2; i++) {
                v128_t products = wasm_i16x8_add(wasm_i16x8_relaxed_dot_i8x16_i7x16(x, w[i]),
                                                 wasm_i16x8_relaxed_dot_i8x16_i7x16(next_x, next_w[i]));
                sum[r][i] = wasm_i32x4_add(sum[r][i], wasm_i32x4_dot_i16x8(products, wasm_i16x8_splat(1)));
                KEEP(sum[r][i]);
            }
        }
    }
#endif
}
INLINE void sums(const int rows, const int8_t *weight, const uint8_t *q, int inputs, ints sum[][INT_VECTORS]) {
    _Pragma("clang loop unroll(disable)") for (int half = 0; half < 2; half++) {
        v128_t total[INT_ROWS][2];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < 2; i++) total[r][i] = sum[r][0].val[2 * half + i];
        add_products(rows, weight + 32 * half, q, inputs, total);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < 2; i++) sum[r][0].val[2 * half + i] = total[r][i];
    }
}
/* One function for all products, since a visitor loads it. */
NOINLINE void inner_loop(int rows, int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                         ints sum[][INT_VECTORS]) {
    (void)vectors; /* one */
    BY_HEIGHT(rows, INT_ROWS, sums, weight, q, inputs, sum)
}
#else
EACH(ints, i_start, (const int32_t *weight_sum), ((void)weight_sum, wasm_i32x4_splat(0)))

/* One instruction multiplies pairs of neighbouring inputs for four outputs, so these weights should be adjacent. */
INLINE v128_t paired(v128_t w) { return wasm_i8x16_shuffle(w, w, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15); }
#ifdef FOR_BROWSERS
/* Once, instead of in every pass. */
void prepare_weights(int8_t *weights, int32_t bytes) {
    for (int32_t i = 0; i < bytes; i += 16) wasm_v128_store(weights + i, paired(wasm_v128_load(weights + i)));
}
INLINE v128_t pairs(const int8_t *p, int pair) { return wasm_i16x8_load8x8(p + 8 * pair); }
#else
INLINE v128_t pairs(const int8_t *p, int pair) {
    const v128_t w = paired(wasm_v128_load(p));
    return pair ? wasm_i16x8_extend_high_i8x16(w) : wasm_i16x8_extend_low_i8x16(w);
}
#endif

enum { CHUNK = 128, STEPS = 4 };

INLINE void add_products(const int rows, const int8_t *weight, const int16_t (*x)[CHUNK], int inputs, v128_t sum[][2]) {
    for (int k = 0; k < inputs; k += 2 * STEPS, weight += 2 * STEPS * LANES)
        UNROLL for (int pair = 0; pair < STEPS; pair++) {
            v128_t w[2];
            UNROLL for (int i = 0; i < 2; i++) w[i] = pairs(weight + pair / 2 * 4 * LANES + 16 * i, pair % 2);
            UNROLL for (int r = 0; r < rows; r++) {
                const v128_t two = wasm_v128_load32_splat(&x[r][k + 2 * pair]);
                UNROLL for (int i = 0; i < 2; i++) {
                    sum[r][i] = wasm_i32x4_add(sum[r][i], wasm_i32x4_dot_i16x8(two, w[i]));
                    KEEP(sum[r][i]);
                }
            }
        }
}
/* Inputs are widened for the whole tile, some at a time; then eight outputs at a time, whose sums fill the registers. */
INLINE void sums(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                 ints sum[][INT_VECTORS]) {
    int16_t x[INT_ROWS][CHUNK];
    for (int chunk = 0; chunk < inputs; chunk += CHUNK) {
        const int count = inputs - chunk < CHUNK ? inputs - chunk : CHUNK;
        UNROLL for (int r = 0; r < rows; r++)
            for (int k = 0; k < count; k += 8)
                wasm_v128_store(&x[r][k], wasm_u16x8_load8x8(q + (size_t)r * inputs + chunk + k));
        _Pragma("clang loop unroll(disable)") for (int v = 0; v < vectors; v++)
            _Pragma("clang loop unroll(disable)") for (int half = 0; half < 2; half++) {
                v128_t total[INT_ROWS][2];
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int i = 0; i < 2; i++) total[r][i] = sum[r][v].val[2 * half + i];
                add_products(rows, weight + ((size_t)v * inputs + chunk) * LANES + 32 * half, x, count, total);
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int i = 0; i < 2; i++) sum[r][v].val[2 * half + i] = total[r][i];
            }
    }
}
NOINLINE void inner_loop(int rows, int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                         ints sum[][INT_VECTORS]) {
    BY_HEIGHT(rows, INT_ROWS, sums, vectors, weight, q, inputs, sum)
}
#endif

enum { BLOCK = 4 };
INLINE void transpose(const float *x, int x_stride, int rows, float *out, int out_stride) {
    v128_t t[4];
    for (int i = 0; i < 4; i++) t[i] = i < rows ? wasm_v128_load(x + (size_t)i * x_stride) : wasm_f32x4_splat(0.f);
    v128_t a = wasm_i32x4_shuffle(t[0], t[1], 0, 4, 1, 5), b = wasm_i32x4_shuffle(t[0], t[1], 2, 6, 3, 7);
    v128_t c = wasm_i32x4_shuffle(t[2], t[3], 0, 4, 1, 5), d = wasm_i32x4_shuffle(t[2], t[3], 2, 6, 3, 7);
    wasm_v128_store(out, wasm_i64x2_shuffle(a, c, 0, 2));
    wasm_v128_store(out + out_stride, wasm_i64x2_shuffle(a, c, 1, 3));
    wasm_v128_store(out + 2 * (size_t)out_stride, wasm_i64x2_shuffle(b, d, 0, 2));
    wasm_v128_store(out + 3 * (size_t)out_stride, wasm_i64x2_shuffle(b, d, 1, 3));
}

#include "encoder.h"
#endif
