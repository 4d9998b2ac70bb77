/* WebAssembly: a register holds 4 floats or 16 bytes, so that four make one step. A browser refuses a whole module for
 * one instruction that it does not know, so relaxed SIMD needs a module of its own.
 *
 * Plain SIMD has no fused multiply-add. Logits differ by less than 1e-5 from those of the other files, unless the
 * difference rounds an activation to the next step of int8, as it does in some texts: then by what such a step changes.
 * Relaxed SIMD fuses if the processor can (x86 since 2013, ARM), and then gives the same bits as the other files. */
#if defined(__wasm_simd128__)
#include <wasm_simd128.h>

#include "model.h"

#ifdef WITH_RELAXED
#define RUN_SHARE run_share_wasm_relaxed
#else
#define RUN_SHARE run_share_wasm
#endif

/* V8 has 16 registers on x86: beyond about ten sums it spills. */
enum { INT_ROWS = 2, INT_VECTORS = 1, FLOAT_ROWS = 2, FLOAT_VECTORS = 1 };

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
INLINE void v_store_bytes(uint8_t *p, vec x) {
    v128_t low = wasm_i16x8_narrow_i32x4(rounded(x.val[0]), rounded(x.val[1]));
    v128_t high = wasm_i16x8_narrow_i32x4(rounded(x.val[2]), rounded(x.val[3]));
    wasm_v128_store(p, wasm_u8x16_narrow_i16x8(low, high));
}

EACH(vec, i_to_float, (ints x), wasm_f32x4_convert_i32x4(x.val[i]))
EACH(ints, i_load, (const int32_t *p), wasm_v128_load(p + 4 * i))

#define OWN_INNER_LOOP
#ifdef WITH_RELAXED
/* The relaxed dot product multiplies signed bytes with bytes of 0 to 127, so weights get 45 more. Activations get 91
 * less: then four products still fit into int16, and every processor gives the same sum. What is computed is
 *   sum (q - 91) (w + 45) = sum q w - 91 sum w + 45 sum (q - 91)
 * The middle term is what sums begin with; the last is one number for each row. */
enum { CENTRE = ACTIVATION_MAX / 2 };
_Static_assert(4 * CENTRE * 2 * WEIGHT_MAX <= INT16_MAX, "four products must fit into int16");
EACH(ints, i_start, (const int32_t *sum), wasm_i32x4_mul(wasm_v128_load(sum + 4 * i), wasm_i32x4_splat(CENTRE)))

INLINE v128_t centred(v128_t q) { return wasm_i8x16_sub(q, wasm_i8x16_splat(CENTRE)); }
INLINE v128_t raised(const int8_t *w) { return wasm_i8x16_add(wasm_v128_load(w), wasm_i8x16_splat(WEIGHT_MAX)); }

/* 45 sum (q - 91) of a row, in every lane. */
INLINE v128_t excess(const uint8_t *q, int inputs) {
    v128_t sum = wasm_i32x4_splat(0);
    for (int k = 0; k < inputs; k += 16) {
        v128_t pairs = wasm_i16x8_extadd_pairwise_i8x16(centred(wasm_v128_load(q + k)));
        sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(pairs, wasm_i16x8_splat(WEIGHT_MAX)));
    }
    sum = wasm_i32x4_add(sum, wasm_i32x4_shuffle(sum, sum, 2, 3, 0, 1));
    return wasm_i32x4_add(sum, wasm_i32x4_shuffle(sum, sum, 1, 0, 3, 2));
}

INLINE void inner_loop(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                       ints sum[][INT_VECTORS]) {
    (void)vectors; /* one */
    UNROLL for (int r = 0; r < rows; r++) {
        const v128_t more = excess(q + (size_t)r * inputs, inputs);
        UNROLL for (int i = 0; i < 4; i++) sum[r][0].val[i] = wasm_i32x4_sub(sum[r][0].val[i], more);
    }
    for (int k = 0; k < inputs; k += 8) {
        v128_t x[INT_ROWS], next_x[INT_ROWS];
        UNROLL for (int r = 0; r < rows; r++) {
            x[r] = centred(wasm_v128_load32_splat(q + (size_t)r * inputs + k));
            next_x[r] = centred(wasm_v128_load32_splat(q + (size_t)r * inputs + k + 4));
        }
        UNROLL for (int i = 0; i < 4; i++) {
            const v128_t w = raised(weight + k * LANES + 16 * i), next_w = raised(weight + (k + 4) * LANES + 16 * i);
            UNROLL for (int r = 0; r < rows; r++) {
                v128_t products = wasm_i16x8_add(wasm_i16x8_relaxed_dot_i8x16_i7x16(x[r], w),
                                                 wasm_i16x8_relaxed_dot_i8x16_i7x16(next_x[r], next_w));
                v128_t *place = &sum[r][0].val[i];
                *place = wasm_i32x4_add(*place, wasm_i32x4_dot_i16x8(products, wasm_i16x8_splat(1)));
                __asm__ volatile("" : "+r"(*place)); /* LLVM would reorder the loop and spill the sums */
            }
        }
    }
}
#else
EACH(ints, i_start, (const int32_t *weight_sum), ((void)weight_sum, wasm_i32x4_splat(0)))

/* Weights are widened to int16 once for all rows and split into the pairs of inputs that one instruction multiplies. */
INLINE void inner_loop(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                       ints sum[][INT_VECTORS]) {
    (void)vectors; /* one */
    for (int k = 0; k < inputs; k += 4) {
        v128_t x[INT_ROWS], next_x[INT_ROWS];
        UNROLL for (int r = 0; r < rows; r++) {
            const v128_t four = wasm_u16x8_extend_low_u8x16(wasm_v128_load32_zero(q + (size_t)r * inputs + k));
            x[r] = wasm_i32x4_shuffle(four, four, 0, 0, 0, 0), next_x[r] = wasm_i32x4_shuffle(four, four, 1, 1, 1, 1);
        }
        UNROLL for (int i = 0; i < 4; i++) {
            const v128_t low = wasm_i16x8_load8x8(weight + k * LANES + 16 * i);
            const v128_t high = wasm_i16x8_load8x8(weight + k * LANES + 16 * i + 8);
            const v128_t w = wasm_i32x4_shuffle(low, high, 0, 2, 4, 6);
            const v128_t next_w = wasm_i32x4_shuffle(low, high, 1, 3, 5, 7);
            UNROLL for (int r = 0; r < rows; r++) {
                v128_t first = wasm_i32x4_dot_i16x8(x[r], w), second = wasm_i32x4_dot_i16x8(next_x[r], next_w);
                sum[r][0].val[i] = wasm_i32x4_add(sum[r][0].val[i], wasm_i32x4_add(first, second));
                __asm__ volatile("" : "+r"(sum[r][0].val[i])); /* LLVM would reorder the loop and spill the sums */
            }
        }
    }
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
