/* AVX-512: a register holds 16 floats, or 64 bytes. With VNNI one instruction adds four products to each of 16 sums. */
#if defined(__x86_64__)
#include "model.h"

#ifdef WITH_VNNI
#define RUN_SHARE run_share_avx512_vnni
enum { INT_ROWS = 6, INT_VECTORS = 4 };
#define FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
TARGET_BEGIN(FEATURES)
#else
#define RUN_SHARE run_share_avx512
enum { INT_ROWS = 6, INT_VECTORS = 2 };
#define FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
TARGET_BEGIN(FEATURES)
#endif
#include "x86.h"

enum { FLOAT_ROWS = 6, FLOAT_VECTORS = 4 };

typedef __m512 vec;
typedef __m512i ints;

INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec v_splat(float x) { return _mm512_set1_ps(x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_sqrt(vec x) { return _mm512_sqrt_ps(x); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE vec v_scale(vec x, vec n) { return _mm512_scalef_ps(x, n); }

INLINE vec v_select(int from, int to, vec a, vec b) {
    const uint32_t below_to = to < LANES ? (1u << (to > 0 ? to : 0)) - 1 : 0xffff;
    const uint32_t below_from = from < LANES ? (1u << (from > 0 ? from : 0)) - 1 : 0xffff;
    return _mm512_mask_mov_ps(b, (__mmask16)(below_to & ~below_from), a);
}

#define HALVES(X) _mm512_castps512_ps256(X), _mm512_extractf32x8_ps(X, 1)
INLINE float v_sum(vec x) { return sum_8(_mm256_add_ps(HALVES(x))); }
INLINE float v_largest(vec x) { return largest_8(_mm256_max_ps(HALVES(x))); }
INLINE float v_smallest(vec x) { return smallest_8(_mm256_min_ps(HALVES(x))); }

INLINE vec v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v_store_bytes(uint8_t *p, vec x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x)));
}

INLINE vec i_to_float(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE ints i_load(const int32_t *p) { return _mm512_loadu_si512(p); }
INLINE ints i_start(const int32_t *weight_sum) {
    (void)weight_sum;
    return _mm512_setzero_si512();
}

INLINE __m512i four_inputs(const uint8_t *q) {
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

#ifdef WITH_VNNI
typedef __m512i activations, weights;

INLINE weights four_weights(const int8_t *p) {
    weights w = _mm512_load_si512(p);
#ifndef AVX512_EMULATION
    __asm__("" : "+v"(w)); /* stay in a register: GCC would load it again for every row */
#endif
    return w;
}
INLINE ints i_dot(ints sum, activations x, weights w) {
#ifdef AVX512_EMULATION
    return _mm512_dpbusd_epi32(sum, x, w);
#else
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); /* the intrinsic makes GCC 12 copy and spill every sum */
    return sum;
#endif
}
#else
#define OWN_INNER_LOOP
/* As in avx2.c. */
INLINE void inner_loop(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                       ints sum[][INT_VECTORS]) {
    for (int k = 0; k < inputs; k += 8) {
        ints w[INT_VECTORS], next_w[INT_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) {
            const int8_t *p = weight + (size_t)v * LANES * inputs + k * LANES;
            w[v] = _mm512_load_si512(p), next_w[v] = _mm512_load_si512(p + 4 * LANES);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m512i x = four_inputs(q + (size_t)r * inputs + k), next_x = four_inputs(q + (size_t)r * inputs + k + 4);
            UNROLL for (int v = 0; v < vectors; v++) {
                __m512i products = _mm512_add_epi16(_mm512_maddubs_epi16(x, w[v]), _mm512_maddubs_epi16(next_x, next_w[v]));
                sum[r][v] = _mm512_add_epi32(sum[r][v], _mm512_madd_epi16(products, _mm512_set1_epi16(1)));
#ifndef AVX512_EMULATION
                __asm__ volatile("" : "+v"(sum[r][v]));
#endif
            }
        }
    }
}
#endif

enum { BLOCK = 16 };
INLINE void transpose(const float *x, int x_stride, int rows, float *out, int out_stride) {
    __m512i t[LANES], u[LANES];
    for (int i = 0; i < LANES; i++)
        t[i] = i < rows ? _mm512_loadu_si512(x + (size_t)i * x_stride) : _mm512_setzero_si512();
    for (int i = 0; i < LANES; i += 2) {
        u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
        u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
        t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
        t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
        t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        u[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        u[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        u[i + 8] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        u[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        t[i] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0xdd);
    }
    for (int i = 0; i < LANES; i++) _mm512_storeu_si512(out + (size_t)i * out_stride, t[i]);
}

#include "encoder.h"
TARGET_END
#endif
