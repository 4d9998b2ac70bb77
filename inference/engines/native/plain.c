/* Plain C, for processors without any of the other instruction sets; and the reference, whose bits the others must give. */
#include <math.h>

#include "model.h"

#define RUN_SHARE run_share_plain
/* Function calls instead of inlining: this file has to be right and to compile quickly, not to be fast. */
#undef INLINE
#define INLINE static

enum { INT_ROWS = 1, INT_VECTORS = 1, FLOAT_ROWS = 1, FLOAT_VECTORS = 1 };

typedef struct {
    float lane[LANES];
} vec;
typedef struct {
    int32_t lane[LANES];
} ints;
typedef const uint8_t *activations;
typedef const int8_t *weights;

#define EACH(NAME, ARGUMENTS, LANE)                          \
    INLINE vec NAME ARGUMENTS {                              \
        vec y;                                               \
        for (int i = 0; i < LANES; i++) y.lane[i] = (LANE);  \
        return y;                                            \
    }
EACH(v_load, (const float *p), p[i])
EACH(v_splat, (float x), x)
EACH(v_add, (vec a, vec b), a.lane[i] + b.lane[i])
EACH(v_sub, (vec a, vec b), a.lane[i] - b.lane[i])
EACH(v_mul, (vec a, vec b), a.lane[i] * b.lane[i])
EACH(v_div, (vec a, vec b), a.lane[i] / b.lane[i])
EACH(v_max, (vec a, vec b), a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i])
EACH(v_min, (vec a, vec b), a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
EACH(v_sqrt, (vec x), sqrtf(x.lane[i]))
EACH(v_round, (vec x), rintf(x.lane[i]))
EACH(v_fma, (vec a, vec b, vec c), fmaf(a.lane[i], b.lane[i], c.lane[i]))
EACH(v_fnma, (vec a, vec b, vec c), fmaf(-a.lane[i], b.lane[i], c.lane[i]))
EACH(v_select, (int from, int to, vec a, vec b), from <= i && i < to ? a.lane[i] : b.lane[i])
EACH(i_to_float, (ints x), (float)x.lane[i])
INLINE void v_store(float *p, vec x) { memcpy(p, x.lane, sizeof(x)); }

/* Whole numbers; anything for NaN, which the other factor holds too. */
INLINE int32_t whole(float x) { return x >= -1e9f && x <= 1e9f ? (int32_t)rintf(x) : 0; }

INLINE float power_of_2(float n) {
    const uint32_t bits = (uint32_t)(whole(n) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof(power));
    return power;
}
EACH(v_scale, (vec x, vec n), x.lane[i] * power_of_2(n.lane[i]))

/* A float16 is 2^-14 (subnormal) to 2^15 times its 11 bits of mantissa. */
INLINE float half(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
                             : ldexpf((float)(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
    return h >> 15 ? -x : x;
}
EACH(v_load_half, (const uint16_t *p), half(p[i]))

INLINE void v_store_bytes(uint8_t *p, vec x) {
    for (int i = 0; i < LANES; i++) {
        const int32_t q = whole(x.lane[i]);
        p[i] = (uint8_t)(q < 0 ? 0 : q > 255 ? 255 : q);
    }
}

#define FOLD(NAME, STEP)                                                                  \
    INLINE float NAME(vec x) {                                                            \
        for (int half = LANES / 2; half; half /= 2)                                       \
            for (int i = 0; i < half; i++) {                                              \
                const float a = x.lane[i], b = x.lane[i + half];                          \
                x.lane[i] = (STEP);                                                       \
            }                                                                             \
        return x.lane[0];                                                                 \
    }
FOLD(v_sum, a + b)
FOLD(v_largest, a > b ? a : b)
FOLD(v_smallest, a < b ? a : b)

INLINE ints i_load(const int32_t *p) {
    ints y;
    memcpy(y.lane, p, sizeof(y));
    return y;
}
INLINE ints i_start(const int32_t *weight_sum) {
    (void)weight_sum;
    return (ints){{0}};
}
INLINE activations four_inputs(const uint8_t *q) { return q; }
INLINE weights four_weights(const int8_t *p) { return p; }
INLINE ints i_dot(ints sum, activations x, weights w) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) sum.lane[i] += x[j] * w[4 * i + j];
    return sum;
}

enum { BLOCK = 1 };
INLINE void transpose(const float *x, int x_stride, int rows, float *out, int out_stride) {
    (void)x_stride, (void)out_stride;
    *out = rows > 0 ? *x : 0.f;
}

#include "encoder.h"
