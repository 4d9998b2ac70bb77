/* What AVX2 and AVX-512 do alike. */
#include <immintrin.h>

/* One number from eight lanes: 4 + 4, then 2 + 2, 1 + 1. */
#define FOLD(NAME, STEP)                                                    \
    INLINE float NAME(__m256 x) {                                           \
        __m128 y = STEP(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); \
        y = STEP(y, _mm_movehl_ps(y, y));                                   \
        return _mm_cvtss_f32(STEP(y, _mm_movehdup_ps(y)));                  \
    }
FOLD(sum_8, _mm_add_ps)
FOLD(largest_8, _mm_max_ps)
FOLD(smallest_8, _mm_min_ps)
