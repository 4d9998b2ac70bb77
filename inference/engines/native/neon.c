/* NEON: a register holds 4 floats or 16 bytes, so that four make one step. NEON multiplies signed bytes, so activations
 * get 128 less and every sum begins with 128 x the sum of its weights. Dot products (all ARM servers since 2019) take
 * four products at once; i8mm (since 2021) a 2 x 2 tile of sums over eight inputs. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "model.h"

#ifdef WITH_I8MM
#define RUN_SHARE run_share_neon_i8mm
#define FEATURES "arch=armv8.2-a+dotprod+i8mm"
TARGET_BEGIN(FEATURES)
#elif defined(WITH_DOTPROD)
#define RUN_SHARE run_share_neon_dotprod
#define FEATURES "arch=armv8.2-a+dotprod"
TARGET_BEGIN(FEATURES)
#else
#define RUN_SHARE run_share_neon
#define FEATURES "arch=armv8-a"
TARGET_BEGIN(FEATURES)
#endif

enum { INT_ROWS = 6, INT_VECTORS = 1, FLOAT_ROWS = 6, FLOAT_VECTORS = 1 };

typedef float32x4x4_t vec;
typedef int32x4x4_t ints;
typedef int8x16x4_t weights;
typedef int8x16_t activations;

#define EACH(TYPE, NAME, ARGUMENTS, QUARTER)                 \
    INLINE TYPE NAME ARGUMENTS {                             \
        TYPE y;                                              \
        UNROLL for (int i = 0; i < 4; i++) y.val[i] = (QUARTER);    \
        return y;                                            \
    }
EACH(vec, v_load, (const float *p), vld1q_f32(p + 4 * i))
EACH(vec, v_splat, (float x), vdupq_n_f32(x))
EACH(vec, v_add, (vec a, vec b), vaddq_f32(a.val[i], b.val[i]))
EACH(vec, v_sub, (vec a, vec b), vsubq_f32(a.val[i], b.val[i]))
EACH(vec, v_mul, (vec a, vec b), vmulq_f32(a.val[i], b.val[i]))
EACH(vec, v_div, (vec a, vec b), vdivq_f32(a.val[i], b.val[i]))
EACH(vec, v_sqrt, (vec x), vsqrtq_f32(x.val[i]))
EACH(vec, v_round, (vec x), vrndnq_f32(x.val[i]))
EACH(vec, v_fma, (vec a, vec b, vec c), vfmaq_f32(c.val[i], a.val[i], b.val[i]))
EACH(vec, v_fnma, (vec a, vec b, vec c), vfmsq_f32(c.val[i], a.val[i], b.val[i]))
/* Not vmaxq: it makes +0 of -0 and 0, and its NaN is its own. */
INLINE float32x4_t max_4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE float32x4_t min_4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
EACH(vec, v_max, (vec a, vec b), max_4(a.val[i], b.val[i]))
EACH(vec, v_min, (vec a, vec b), min_4(a.val[i], b.val[i]))
INLINE void v_store(float *p, vec x) {
    UNROLL for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.val[i]);
}

INLINE float32x4_t power_of_2(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
EACH(vec, v_scale, (vec x, vec n), vmulq_f32(x.val[i], power_of_2(n.val[i])))

INLINE float32x4_t select_4(int from, int to, float32x4_t a, float32x4_t b) {
    static const int32_t lanes[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to))), a, b);
}
EACH(vec, v_select, (int from, int to, vec a, vec b), select_4(from - 4 * i, to - 4 * i, a.val[i], b.val[i]))

/* 8 + 8 lanes, then 4 + 4, 2 + 2, 1 + 1. */
#define FOLD(NAME, STEP)                                                                          \
    INLINE float NAME(vec x) {                                                                    \
        float32x4_t y = STEP(STEP(x.val[0], x.val[2]), STEP(x.val[1], x.val[3]));                 \
        y = STEP(y, vextq_f32(y, y, 2));                                                          \
        return vgetq_lane_f32(STEP(y, vdupq_laneq_f32(y, 1)), 0);                                 \
    }
FOLD(v_sum, vaddq_f32)
FOLD(v_largest, max_4)
FOLD(v_smallest, min_4)

EACH(vec, v_load_half, (const uint16_t *p), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))))
INLINE void v_store_bytes(uint8_t *p, vec x) {
    UNROLL for (int i = 0; i < 4; i += 2) {
        uint16x4_t low = vqmovun_s32(vcvtnq_s32_f32(x.val[i])), high = vqmovun_s32(vcvtnq_s32_f32(x.val[i + 1]));
        vst1_u8(p + 4 * i, vqmovn_u16(vcombine_u16(low, high)));
    }
}

EACH(vec, i_to_float, (ints x), vcvtq_f32_s32(x.val[i]))
EACH(ints, i_load, (const int32_t *p), vld1q_s32(p + 4 * i))

#ifdef WITH_I8MM
/* Unsigned activations as they are. */
EACH(ints, i_start, (const int32_t *weight_sum), ((void)weight_sum, vdupq_n_s32(0)))

/* USMMLA multiplies two rows of eight activations with two outputs' eight weights: rows r and r + 1, outputs o and
 * o + 1 give the sums (r, o), (r, o + 1), (r + 1, o), (r + 1, o + 1). `inputs` is a multiple of 16. */
#define OWN_INNER_LOOP
INLINE void inner_loop(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                       ints sum[][INT_VECTORS]) {
    (void)vectors; /* one */
    const int pairs = (rows + 1) / 2;
    int32x4_t tile[(INT_ROWS + 1) / 2][8];
    UNROLL for (int p = 0; p < pairs; p++)
        UNROLL for (int o = 0; o < 8; o++) tile[p][o] = vdupq_n_s32(0);
    for (int k = 0; k < inputs; k += 8) {
        uint8x16_t x[(INT_ROWS + 1) / 2];
        UNROLL for (int p = 0; p < pairs; p++) {
            const uint8_t *row = q + (size_t)2 * p * inputs + k;
            x[p] = vcombine_u8(vld1_u8(row), 2 * p + 1 < rows ? vld1_u8(row + inputs) : vdup_n_u8(0));
        }
        UNROLL for (int i = 0; i < 4; i++) {
            /* The first four weights of four outputs and their next four, interleaved to eight per output. */
            int32x4_t first = vreinterpretq_s32_s8(vld1q_s8(weight + k * LANES + 16 * i));
            int32x4_t next = vreinterpretq_s32_s8(vld1q_s8(weight + k * LANES + 64 + 16 * i));
            int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(first, next)), high = vreinterpretq_s8_s32(vzip2q_s32(first, next));
            UNROLL for (int p = 0; p < pairs; p++) {
                tile[p][2 * i] = vusmmlaq_s32(tile[p][2 * i], x[p], low);
                tile[p][2 * i + 1] = vusmmlaq_s32(tile[p][2 * i + 1], x[p], high);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < 4; i++) {
            int64x2_t a = vreinterpretq_s64_s32(tile[r / 2][2 * i]), b = vreinterpretq_s64_s32(tile[r / 2][2 * i + 1]);
            sum[r][0].val[i] = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
        }
}
#else
EACH(ints, i_start, (const int32_t *weight_sum), vshlq_n_s32(vld1q_s32(weight_sum + 4 * i), 7))

INLINE activations four_inputs(const uint8_t *q) {
    uint32_t four;
    memcpy(&four, q, 4);
    return vreinterpretq_s8_u32(vdupq_n_u32(four ^ 0x80808080u)); /* x - 128, as signed bytes */
}
EACH(weights, four_weights, (const int8_t *p), vld1q_s8(p + 16 * i))

INLINE int32x4_t dot_4(int32x4_t sum, int8x16_t x, int8x16_t w) {
#ifdef WITH_DOTPROD
    return vdotq_s32(sum, x, w);
#else
    /* Products in int16, summed by pairs in int16, then by pairs into the sum. */
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(w)), high = vmull_high_s8(x, w);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}
EACH(ints, i_dot, (ints sum, activations x, weights w), dot_4(sum.val[i], x, w.val[i]))
#endif

enum { BLOCK = 4 };
INLINE void transpose(const float *x, int x_stride, int rows, float *out, int out_stride) {
    float32x4_t t[4];
    for (int i = 0; i < 4; i++) t[i] = i < rows ? vld1q_f32(x + (size_t)i * x_stride) : vdupq_n_f32(0.f);
    float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(t[0], t[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(t[0], t[1]));
    float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(t[2], t[3])), d = vreinterpretq_f64_f32(vtrn2q_f32(t[2], t[3]));
    vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
    vst1q_f32(out + out_stride, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
    vst1q_f32(out + 2 * (size_t)out_stride, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
    vst1q_f32(out + 3 * (size_t)out_stride, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
}

#include "encoder.h"
TARGET_END
#endif
