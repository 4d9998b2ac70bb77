/* AVX2: a register holds 8 floats or 32 bytes, so that two make one step. Products are summed in int16 first, 16 to a
 * number or four; with AVX-VNNI one instruction adds four of them to each of 8 sums. */
#if defined(__x86_64__)
#include "model.h"

#ifdef WITH_VNNI
#define RUN_SHARE run_share_avx_vnni
#define FEATURES "avx2,fma,f16c,avxvnni"
TARGET_BEGIN(FEATURES)
enum { INT_ROWS = 6, INT_VECTORS = 1 };
#else
#define RUN_SHARE run_share_avx2
#define FEATURES "avx2,fma,f16c"
TARGET_BEGIN(FEATURES)
enum { INT_ROWS = 5, INT_VECTORS = 1 };
#endif
#include "x86.h"

enum { FLOAT_ROWS = 6, FLOAT_VECTORS = 1 };

typedef struct {
    __m256 a, b;
} vec;
typedef struct {
    __m256i a, b;
} ints;

#define EACH(NAME, STEP) \
    INLINE vec NAME(vec x, vec y) { return (vec){STEP(x.a, y.a), STEP(x.b, y.b)}; }
EACH(v_add, _mm256_add_ps)
EACH(v_sub, _mm256_sub_ps)
EACH(v_mul, _mm256_mul_ps)
EACH(v_div, _mm256_div_ps)
EACH(v_max, _mm256_max_ps)
EACH(v_min, _mm256_min_ps)
INLINE vec v_load(const float *p) { return (vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, vec x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE vec v_splat(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec v_sqrt(vec x) { return (vec){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE vec v_fma(vec x, vec y, vec z) { return (vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE vec v_fnma(vec x, vec y, vec z) { return (vec){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }

#define TO_EVEN (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
INLINE vec v_round(vec x) { return (vec){_mm256_round_ps(x.a, TO_EVEN), _mm256_round_ps(x.b, TO_EVEN)}; }

INLINE __m256 power_of_2(__m256 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE vec v_scale(vec x, vec n) { return v_mul(x, (vec){power_of_2(n.a), power_of_2(n.b)}); }

INLINE __m256 select_8(int from, int to, __m256 x, __m256 y) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane), inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane);
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_andnot_si256(before, inside)));
}
INLINE vec v_select(int from, int to, vec x, vec y) {
    return (vec){select_8(from, to, x.a, y.a), select_8(from - 8, to - 8, x.b, y.b)};
}

INLINE float v_sum(vec x) { return sum_8(_mm256_add_ps(x.a, x.b)); }
INLINE float v_largest(vec x) { return largest_8(_mm256_max_ps(x.a, x.b)); }
INLINE float v_smallest(vec x) { return smallest_8(_mm256_min_ps(x.a, x.b)); }

INLINE vec v_load_half(const uint16_t *p) {
    const __m128i *q = (const __m128i *)p;
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
INLINE void v_store_bytes(uint8_t *p, vec x) {
    __m256i y = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    y = _mm256_permute4x64_epi64(y, 0xd8); /* packing goes by halves of the register */
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}

INLINE vec i_to_float(ints x) { return (vec){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE ints i_load(const int32_t *p) {
    return (ints){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE ints i_start(const int32_t *weight_sum) {
    (void)weight_sum;
    return (ints){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

INLINE __m256i four_inputs(const uint8_t *q) {
    int32_t four;
    memcpy(&four, q, 4);
    return _mm256_set1_epi32(four);
}

#ifdef WITH_VNNI
typedef __m256i activations;
typedef ints weights;

INLINE weights four_weights(const int8_t *p) {
    weights w = i_load((const int32_t *)p);
    __asm__("" : "+x"(w.a), "+x"(w.b)); /* stay in registers: GCC would load them again for every row */
    return w;
}
INLINE __m256i dot_8(__m256i sum, __m256i x, __m256i w) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
    return sum;
}
INLINE ints i_dot(ints sum, activations x, weights w) { return (ints){dot_8(sum.a, x, w.a), dot_8(sum.b, x, w.b)}; }
#else
#define OWN_INNER_LOOP
INLINE __m256i dot_8(__m256i sum, __m256i x, __m256i w, __m256i next_x, __m256i next_w) {
    /* Two products in each int16, and the next two added: four fit. Then pairs into the sum. */
    __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(x, w), _mm256_maddubs_epi16(next_x, next_w));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
    __asm__ volatile("" : "+x"(sum)); /* GCC would put off the sums, and spill what they wait for */
    return sum;
}
INLINE void inner_loop(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                       ints sum[][INT_VECTORS]) {
    (void)vectors; /* one */
    for (int k = 0; k < inputs; k += 8) {
        ints w = i_load((const int32_t *)(weight + k * LANES)), next_w = i_load((const int32_t *)(weight + (k + 4) * LANES));
        UNROLL for (int r = 0; r < rows; r++) {
            __m256i x = four_inputs(q + (size_t)r * inputs + k), next_x = four_inputs(q + (size_t)r * inputs + k + 4);
            sum[r][0].a = dot_8(sum[r][0].a, x, w.a, next_x, next_w.a);
            sum[r][0].b = dot_8(sum[r][0].b, x, w.b, next_x, next_w.b);
        }
    }
}

/* Multiplications are the limit: of Zen 3's four vector units two multiply, and widening is a multiplication too. Per
 * row, 8 outputs and 32 inputs this loop has 9 of them and inner_loop 12. Tiles of 2 rows and 32 outputs, whose totals
 * fit into registers, were slower: they read the weights more often. */
#define CENTRED_LOOP
INLINE __m256i add_products(__m256i sum, __m256i x, __m256i w) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, w));
    __asm__ volatile("" : "+x"(sum)); /* as above */
    return sum;
}
INLINE void centred_loop(const int rows, const Linear *layer, int column, const int16_t *centres, const uint8_t *q,
                         ints sum[][INT_VECTORS]) {
    const int inputs = layer->inputs;
    const int8_t *weight = layer->weight + (size_t)column * inputs;
    const ints weight_sum = i_load(layer->weight_sum + column);
    const __m256i one = _mm256_set1_epi16(1), centre = _mm256_set1_epi32(ACTIVATION_CENTRE);
    ints total[INT_ROWS], *t = total;
    for (int r = 0; r < rows; r++)
        t[r] = (ints){_mm256_mullo_epi32(weight_sum.a, centre), _mm256_mullo_epi32(weight_sum.b, centre)};
    for (int k = 0; k < inputs; k += CENTRED) {
        ints s[INT_ROWS];
        UNROLL for (int r = 0; r < rows; r++) s[r] = i_load((const int32_t *)(centres + k));
        UNROLL for (int i = 0; i < CENTRED; i += 4) {
            ints w = i_load((const int32_t *)(weight + (k + i) * LANES));
            UNROLL for (int r = 0; r < rows; r++) {
                __m256i x = four_inputs(q + (size_t)r * inputs + k + i);
                s[r].a = add_products(s[r].a, x, w.a);
                s[r].b = add_products(s[r].b, x, w.b);
            }
        }
        /* Until here the totals are in memory: the registers are for s. */
        __asm__ volatile("" : "+r"(t) : : "memory");
        UNROLL for (int r = 0; r < rows; r++) {
            t[r].a = _mm256_add_epi32(t[r].a, _mm256_madd_epi16(s[r].a, one));
            t[r].b = _mm256_add_epi32(t[r].b, _mm256_madd_epi16(s[r].b, one));
        }
    }
    UNROLL for (int r = 0; r < rows; r++) sum[r][0] = t[r];
}
#endif

enum { BLOCK = 8 };
INLINE void transpose(const float *x, int x_stride, int rows, float *out, int out_stride) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i++) t[i] = i < rows ? _mm256_loadu_ps(x + (size_t)i * x_stride) : _mm256_setzero_ps();
    for (int i = 0; i < 8; i += 2) {
        u[i] = _mm256_unpacklo_ps(t[i], t[i + 1]);
        u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            t[i + 2 * j] = _mm256_shuffle_ps(u[i + j], u[i + j + 2], 0x44);
            t[i + 2 * j + 1] = _mm256_shuffle_ps(u[i + j], u[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + (size_t)i * out_stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
        _mm256_storeu_ps(out + (size_t)(i + 4) * out_stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    }
}

#include "encoder.h"
TARGET_END
#endif
