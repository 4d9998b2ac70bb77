/* The AVX-512 intrinsics of avx512.c in plain C, so that a processor with only AVX2 can check that file's arithmetic.
 * Included before every file by the compiler's -include; what stands here follows Intel's description of each. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "model.h"

#define AVX512_EMULATION
/* Calls instead of copies, as in plain.c: this is to be quickly compiled. */
#undef INLINE
#define INLINE static __attribute__((unused))
#undef TARGET_BEGIN
#undef TARGET_END
#define TARGET_BEGIN(FEATURES)
#define TARGET_END
#define __builtin_cpu_supports(FEATURE) (!strncmp(FEATURE, "avx512", 6) || __builtin_cpu_supports(FEATURE))

typedef float floats_16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints_16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int16_t shorts_32 __attribute__((vector_size(64)));
typedef int8_t bytes_64 __attribute__((vector_size(64)));
typedef uint8_t unsigned_bytes_64 __attribute__((vector_size(64)));
#define __m512 floats_16
#define __m512i ints_16

#define EACH_16(TYPE, NAME, ARGUMENTS, LANE)              \
    INLINE TYPE NAME ARGUMENTS {                          \
        TYPE y;                                           \
        for (int i = 0; i < 16; i++) y[i] = (LANE);       \
        return y;                                         \
    }
EACH_16(floats_16, emulated_fma, (floats_16 a, floats_16 b, floats_16 c), fmaf(a[i], b[i], c[i]))
EACH_16(floats_16, emulated_sqrt, (floats_16 x), sqrtf(x[i]))
EACH_16(floats_16, emulated_round, (floats_16 x), rintf(x[i]))
EACH_16(floats_16, emulated_scale, (floats_16 x, floats_16 n), isnan(n[i]) ? n[i] : ldexpf(x[i], (int)floorf(n[i])))
EACH_16(floats_16, emulated_max, (floats_16 a, floats_16 b), a[i] > b[i] ? a[i] : b[i])
EACH_16(floats_16, emulated_min, (floats_16 a, floats_16 b), a[i] < b[i] ? a[i] : b[i])
EACH_16(floats_16, emulated_select, (floats_16 other, uint32_t mask, floats_16 x), mask >> i & 1 ? x[i] : other[i])
EACH_16(floats_16, emulated_to_floats, (ints_16 x), (float)x[i])
EACH_16(floats_16, emulated_from_half, (__m256i x), _cvtsh_ss(((const uint16_t *)&x)[i]))
EACH_16(ints_16, emulated_to_ints, (floats_16 x), _mm_cvtss_si32(_mm_set_ss(x[i])))
EACH_16(floats_16, emulated_splat, (float x), x)
EACH_16(ints_16, emulated_splat_int, (int32_t x), x)
EACH_16(ints_16, emulated_weave, (ints_16 a, ints_16 b, int from),
        i % 2 ? b[i / 4 * 4 + from + i % 4 / 2] : a[i / 4 * 4 + from + i % 4 / 2])
EACH_16(ints_16, emulated_weave_pairs, (ints_16 a, ints_16 b, int from),
        i % 4 < 2 ? a[i / 4 * 4 + from + i % 2] : b[i / 4 * 4 + from + i % 2])
EACH_16(ints_16, emulated_quarters, (ints_16 a, ints_16 b, int which),
        (i < 8 ? a : b)[4 * (which >> i / 4 * 2 & 3) + i % 4])

INLINE ints_16 emulated_dpbusd(ints_16 sum, ints_16 x, ints_16 w) {
    const unsigned_bytes_64 q = (unsigned_bytes_64)x;
    const bytes_64 weight = (bytes_64)w;
    for (int i = 0; i < 64; i++) sum[i / 4] += q[i] * weight[i];
    return sum;
}
INLINE ints_16 emulated_maddubs(ints_16 x, ints_16 w) {
    const unsigned_bytes_64 q = (unsigned_bytes_64)x;
    const bytes_64 weight = (bytes_64)w;
    shorts_32 y;
    for (int i = 0; i < 32; i++) {
        const int pair = q[2 * i] * weight[2 * i] + q[2 * i + 1] * weight[2 * i + 1];
        y[i] = (int16_t)(pair > INT16_MAX ? INT16_MAX : pair < INT16_MIN ? INT16_MIN : pair);
    }
    return (ints_16)y;
}
INLINE ints_16 emulated_madd(ints_16 a, ints_16 b) {
    const shorts_32 x = (shorts_32)a, y = (shorts_32)b;
    ints_16 sum;
    for (int i = 0; i < 16; i++) sum[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return sum;
}
INLINE __m128i emulated_to_bytes(ints_16 x) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)((uint32_t)x[i] > 255 ? 255 : x[i]);
    return _mm_loadu_si128((const __m128i *)bytes);
}

#define _mm512_loadu_ps(p) (*(const floats_16 *)(p))
#define _mm512_storeu_ps(p, x) (*(floats_16 *)(p) = (x))
#define _mm512_loadu_si512(p) (*(const ints_16 *)(p))
#define _mm512_load_si512 _mm512_loadu_si512
#define _mm512_storeu_si512(p, x) (*(ints_16 *)(p) = (x))
#define _mm512_set1_ps emulated_splat
#define _mm512_set1_epi32 emulated_splat_int
#define _mm512_set1_epi16(x) emulated_splat_int((x) * 0x10001)
#define _mm512_setzero_si512() emulated_splat_int(0)
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_sub_ps(a, b) ((a) - (b))
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_div_ps(a, b) ((a) / (b))
#define _mm512_sqrt_ps emulated_sqrt
#define _mm512_fmadd_ps emulated_fma
#define _mm512_fnmadd_ps(a, b, c) emulated_fma(-(a), b, c)
#define _mm512_max_ps emulated_max
#define _mm512_min_ps emulated_min
#define _mm512_roundscale_ps(x, mode) emulated_round(x)
#define _mm512_scalef_ps emulated_scale
#define _mm512_mask_mov_ps emulated_select
#define _mm512_castps512_ps256(x) _mm256_loadu_ps((const float *)&(x))
#define _mm512_extractf32x8_ps(x, half) _mm256_loadu_ps((const float *)&(x) + 8 * (half))
#define _mm512_cvtph_ps emulated_from_half
#define _mm512_cvtepi32_ps emulated_to_floats
#define _mm512_cvtps_epi32 emulated_to_ints
#define _mm512_cvtusepi32_epi8 emulated_to_bytes
#define _mm512_add_epi16(a, b) ((ints_16)((shorts_32)(a) + (shorts_32)(b)))
#define _mm512_add_epi32(a, b) ((a) + (b))
#define _mm512_maddubs_epi16 emulated_maddubs
#define _mm512_madd_epi16 emulated_madd
#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _mm512_unpacklo_epi32(a, b) emulated_weave(a, b, 0)
#define _mm512_unpackhi_epi32(a, b) emulated_weave(a, b, 2)
#define _mm512_unpacklo_epi64(a, b) emulated_weave_pairs(a, b, 0)
#define _mm512_unpackhi_epi64(a, b) emulated_weave_pairs(a, b, 2)
#define _mm512_shuffle_i32x4 emulated_quarters
