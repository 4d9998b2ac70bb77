/* The encoder of BERT and DistilBERT in int8 on AVX512-VNNI: one call, whole texts in, logits out.
 *
 * Texts lie end to end and are never padded: every linear layer works on the rows (tokens) of all texts at once, only
 * attention knows where a text begins and ends. Weights are int8 with one scale an output channel; activations are
 * quantised to uint8 while they pass, with a scale and an offset of their own for each row, so that no calibration is
 * needed. Attention, softmax, GELU, LayerNorm and residuals stay in float32. In the last block only the first token
 * of each text is carried on: it is all that the classifier reads.
 *
 * Source: quantisation by row, Yao et al. 2022, "ZeroQuant" (arXiv:2206.01861), section 3.1; instruction VPDPBUSD,
 * Intel 64 and IA-32 Software Developer's Manual, volume 2.
 */
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, TILE_ROWS = 6, TILE_VECTORS = 4, PANEL = LANES * TILE_VECTORS };
/* Rows that go through a whole block together: their widest activation (rows x 3072 floats) stays in the L2 cache. Up to
 * half as many more, so that a text of 50 tokens does not read all weights a second time for its last two. */
enum { ROW_BLOCK = 8 * TILE_ROWS, MOST_ROWS = ROW_BLOCK * 3 / 2 };
enum { SPINS_BEFORE_YIELD = 4000, ALIGNMENT = 64 };

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef __m512 vec;

/* y = x W^T + bias with int8 weights. Weights are packed as [panels of 64 outputs][inputs / 4][64][4]. */
typedef struct {
    int32_t outputs, inputs;
    const int8_t *weight;
    const float *scale;      /* (outputs,) */
    const float *row_offset; /* (outputs,): scale x sum of the output's int8 weights */
    const float *bias;       /* (outputs,) */
} Linear;

typedef struct {
    const float *gain, *bias;
} Norm;

typedef struct {
    Linear query, key_value, attention_out, wide, narrow;
    Norm attention_norm, output_norm;
} Block;

enum Activation { GELU = 0, RELU = 1 };

typedef struct {
    int32_t blocks, width, wide, heads, labels, activation, head_is_tanh;
    float norm_epsilon;
    const uint16_t *words;  /* float16 (vocabulary, width) */
    const float *positions; /* (positions, width), token type 0 added where the model has types */
    Norm embedding_norm;
    const Block *block;
    const float *pooler_weight, *pooler_bias;         /* (width, width) input-major, (width,) */
    const float *classifier_weight, *classifier_bias; /* (labels, width), (labels,) */
} Model;

typedef struct {
    const int32_t *ids;     /* (rows,) */
    const int32_t *starts;  /* (texts + 1,): first row of each text, then the number of rows */
    int32_t texts;
    float *logits; /* (texts, labels) */
} Batch;

/* A quantised row is scale x q + offset. */
typedef struct {
    float scale, offset;
} RowScale;

/* What one thread works on: MOST_ROWS rows of everything. */
typedef struct {
    int32_t longest; /* text that fits */
    float *wide, *scores, *keys, *row;
    uint8_t *quantised;
    RowScale *scales;
} Scratch;

struct Pool;

typedef struct Session {
    struct Pool *pool;
    const Model *model;
    int32_t row_capacity, text_capacity;
    float *hidden;          /* (rows, width) */
    uint8_t *quantised;     /* (rows, width) */
    RowScale *scales;       /* (rows,) */
    float *query;           /* (rows, width); attention turns each query into its context in place */
    float *key_value[2];    /* (rows, 2 width); two, so that a fast thread may start the next block */
    float *first, *pooled;  /* (texts, width) */
    uint8_t *first_quantised;
    RowScale *first_scales;
    Scratch scratch;        /* of the thread that calls */
    _Atomic int32_t arrived, generation;
} Session;

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
    pthread_mutex_t mutex; /* guards the list of idle helpers; only callers take it */
    Helper *idle;
    int32_t helpers;
    Helper helper[];
} Pool;

/* ---------------------------------------------------------------- arithmetic */

/* MAXPS and MINPS give their second operand where either is NaN. Every limit below is therefore the first operand, so
 * that NaN passes through to the answer, where it is noticed, instead of becoming the limit. */

/* exp(x) for x <= 88; relative error below 2e-7. */
INLINE vec exp_vec(vec x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.f), x);
    vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    vec p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
    return _mm512_scalef_ps(p, n);
}

INLINE vec tanh_vec(vec x) {
    x = _mm512_min_ps(_mm512_set1_ps(15.f), _mm512_max_ps(_mm512_set1_ps(-15.f), x));
    vec e = exp_vec(_mm512_add_ps(x, x));
    vec one = _mm512_set1_ps(1.f);
    return _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
}

/* x Phi(x), Phi by a polynomial in x^2 (minimax on |x| <= 4): error below 2e-4, a sixtieth of the step of int8 after it. */
INLINE vec gelu_vec(vec x) {
    vec near = _mm512_min_ps(_mm512_set1_ps(4.f), _mm512_max_ps(_mm512_set1_ps(-4.f), x));
    vec square = _mm512_mul_ps(near, near);
    vec p = _mm512_set1_ps(2.2779904185e-8f);
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-1.5985249319e-6f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(4.7954006732e-5f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-8.1400107592e-4f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(8.7723201141e-3f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-6.4572960138e-2f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(3.9788323641e-1f));
    return _mm512_mul_ps(x, _mm512_fmadd_ps(p, near, _mm512_set1_ps(0.5f)));
}

/* ---------------------------------------------------------------- rows */

/* A byte has no NaN and no infinity: a row with either gets NaN as its scale, and so has NaN in all that follows. */
INLINE RowScale quantise_row(const float *x, uint8_t *q, int width) {
    const vec zero = _mm512_setzero_ps();
    vec low = _mm512_loadu_ps(x), high = low, spoilt = _mm512_mul_ps(low, zero); /* 0, or NaN */
    for (int i = LANES; i < width; i += LANES) {
        vec v = _mm512_loadu_ps(x + i);
        low = _mm512_min_ps(low, v);
        high = _mm512_max_ps(high, v);
        spoilt = _mm512_fmadd_ps(v, zero, spoilt);
    }
    float smallest = _mm512_reduce_min_ps(low), range = _mm512_reduce_max_ps(high) - smallest;
    RowScale scale = {range / 255.f + _mm512_reduce_add_ps(spoilt), smallest};
    vec inverse = _mm512_set1_ps(range > 0.f ? 255.f / range : 0.f), offset = _mm512_set1_ps(smallest);
    for (int i = 0; i < width; i += LANES) {
        vec v = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), offset), inverse);
        _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(v)));
    }
    return scale;
}

INLINE void normalise_row(float *x, Norm norm, int width, float epsilon) {
    vec sum = _mm512_setzero_ps(), squares = sum;
    for (int i = 0; i < width; i += LANES) sum = _mm512_add_ps(sum, _mm512_loadu_ps(x + i));
    vec mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)width);
    for (int i = 0; i < width; i += LANES) {
        vec d = _mm512_sub_ps(_mm512_loadu_ps(x + i), mean);
        squares = _mm512_fmadd_ps(d, d, squares);
    }
    float variance = _mm512_reduce_add_ps(squares) / (float)width;
    vec factor = _mm512_div_ps(_mm512_set1_ps(1.f), _mm512_sqrt_ps(_mm512_set1_ps(variance + epsilon)));
    for (int i = 0; i < width; i += LANES) {
        vec d = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), mean), factor);
        d = _mm512_fmadd_ps(d, _mm512_loadu_ps(norm.gain + i), _mm512_loadu_ps(norm.bias + i));
        _mm512_storeu_ps(x + i, d);
    }
}

/* Into how many blocks of near-equal height rows are divided, at most MOST_ROWS each. */
INLINE int row_blocks(int rows) { return rows < MOST_ROWS ? rows > 0 : (rows + ROW_BLOCK / 2) / ROW_BLOCK; }

/* ---------------------------------------------------------------- matrix products */

enum Epilogue { STORE, STORE_GELU, STORE_RELU, ADD };

/* sum + four products of uint8 x and int8 w in each lane. The intrinsic makes GCC 12 copy and spill every sum. */
INLINE __m512i dot4(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}

/* One tile: `tile_rows` rows x 64 outputs in registers, over all inputs. */
INLINE void linear_tile(const int tile_rows, const enum Epilogue epilogue, const Linear *layer, int panel,
                        const uint8_t *q, const RowScale *scales, float *out, int out_stride) {
    const int inputs = layer->inputs;
    const int8_t *weight = layer->weight + (size_t)panel * inputs * PANEL;
    __m512i sum[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < tile_rows; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = _mm512_setzero_si512();
    for (int k = 0; k < inputs; k += 4, weight += 4 * PANEL) {
        __m512i w[TILE_VECTORS];
        UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
            w[v] = _mm512_load_si512(weight + v * 4 * LANES);
            __asm__("" : "+v"(w[v])); /* stay in a register: GCC would load it again for every row */
        }
        UNROLL for (int r = 0; r < tile_rows; r++) {
            int32_t four;
            memcpy(&four, q + (size_t)r * inputs + k, 4);
            __m512i x = _mm512_set1_epi32(four);
            UNROLL for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = dot4(sum[r][v], x, w[v]);
        }
    }
    UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
        int column = panel * PANEL + v * LANES;
        if (column >= layer->outputs) break;
        vec scale = _mm512_loadu_ps(layer->scale + column), shift = _mm512_loadu_ps(layer->row_offset + column);
        vec bias = _mm512_loadu_ps(layer->bias + column);
        UNROLL for (int r = 0; r < tile_rows; r++) {
            float *place = out + (size_t)r * out_stride + column;
            vec y = _mm512_fmadd_ps(_mm512_set1_ps(scales[r].offset), shift, bias);
            vec s = _mm512_mul_ps(_mm512_set1_ps(scales[r].scale), scale);
            y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][v]), s, y);
            if (epilogue == STORE_GELU) y = gelu_vec(y);
            if (epilogue == STORE_RELU) y = _mm512_max_ps(_mm512_setzero_ps(), y);
            if (epilogue == ADD) y = _mm512_add_ps(y, _mm512_loadu_ps(place));
            _mm512_storeu_ps(place, y);
        }
    }
}

#define TILE_CASES(CALL)                                                            \
    switch (height) {                                                               \
    case 1: CALL(1); break;                                                         \
    case 2: CALL(2); break;                                                         \
    case 3: CALL(3); break;                                                         \
    case 4: CALL(4); break;                                                         \
    case 5: CALL(5); break;                                                         \
    default: CALL(6);                                                               \
    }

/* out (rows, outputs) = or += q W^T + bias; tiles of equal height, since a lone last row would cost a whole tile. */
INLINE void linear(const enum Epilogue epilogue, const Linear *layer, const uint8_t *q, const RowScale *scales,
                   int rows, float *out, int out_stride) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int panel = 0; panel * PANEL < layer->outputs; panel++)
        for (int tile = 0; tile < tiles; tile++) {
            const int row = (int)((int64_t)rows * tile / tiles), height = (int)((int64_t)rows * (tile + 1) / tiles) - row;
#define CALL(N) linear_tile(N, epilogue, layer, panel, q + (size_t)row * layer->inputs, scales + row, \
                            out + (size_t)row * out_stride, out_stride)
            TILE_CASES(CALL)
#undef CALL
        }
}

static __attribute__((noinline)) void linear_store(const Linear *l, const uint8_t *q, const RowScale *s, int rows,
                                                   float *out, int stride) {
    linear(STORE, l, q, s, rows, out, stride);
}
static __attribute__((noinline)) void linear_add(const Linear *l, const uint8_t *q, const RowScale *s, int rows,
                                                 float *out, int stride) {
    linear(ADD, l, q, s, rows, out, stride);
}
static __attribute__((noinline)) void linear_gelu(const Linear *l, const uint8_t *q, const RowScale *s, int rows,
                                                  float *out, int stride) {
    linear(STORE_GELU, l, q, s, rows, out, stride);
}
static __attribute__((noinline)) void linear_relu(const Linear *l, const uint8_t *q, const RowScale *s, int rows,
                                                  float *out, int stride) {
    linear(STORE_RELU, l, q, s, rows, out, stride);
}

INLINE void float_tile(const int tile_rows, const int vectors, const float *a, int a_stride, const float *b,
                       int b_stride, int inner, float *out, int out_stride) {
    vec sum[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < tile_rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_setzero_ps();
    for (int k = 0; k < inner; k++, b += b_stride) {
        vec w[TILE_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) w[v] = _mm512_loadu_ps(b + v * LANES);
        UNROLL for (int r = 0; r < tile_rows; r++) {
            vec x = _mm512_set1_ps(a[(size_t)r * a_stride + k]);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_fmadd_ps(x, w[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < tile_rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) _mm512_storeu_ps(out + (size_t)r * out_stride + v * LANES, sum[r][v]);
}

INLINE void float_strip(const int vectors, const float *a, int a_stride, const float *b, int b_stride, int rows,
                        int inner, float *out, int out_stride) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int tile = 0; tile < tiles; tile++) {
        const int row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
#define CALL(N) float_tile(N, vectors, a + (size_t)row * a_stride, a_stride, b, b_stride, inner, \
                           out + (size_t)row * out_stride, out_stride)
        TILE_CASES(CALL)
#undef CALL
    }
}

/* out (rows, columns) = a (rows, inner) b (inner, columns); columns a multiple of 16. */
static void float_product(const float *a, int a_stride, const float *b, int b_stride, int rows, int columns, int inner,
                          float *out, int out_stride) {
    for (int column = 0; column < columns; column += PANEL) {
        const float *strip = b + column;
        float *place = out + column;
        switch ((columns - column) / LANES) {
        case 1: float_strip(1, a, a_stride, strip, b_stride, rows, inner, place, out_stride); break;
        case 2: float_strip(2, a, a_stride, strip, b_stride, rows, inner, place, out_stride); break;
        case 3: float_strip(3, a, a_stride, strip, b_stride, rows, inner, place, out_stride); break;
        default: float_strip(4, a, a_stride, strip, b_stride, rows, inner, place, out_stride);
        }
    }
}

/* ---------------------------------------------------------------- attention */

/* out (16 columns of a row each, out_stride apart) = transpose of 16 rows of 16 floats; rows beyond `rows` read 0. */
INLINE void transpose_16(const float *x, int x_stride, int rows, float *out, int out_stride) {
    __m512i t[LANES], u[LANES];
    UNROLL for (int i = 0; i < LANES; i++)
        t[i] = i < rows ? _mm512_castps_si512(_mm512_loadu_ps(x + (size_t)i * x_stride)) : _mm512_setzero_si512();
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
    for (int i = 0; i < LANES; i++) _mm512_storeu_ps(out + (size_t)i * out_stride, _mm512_castsi512_ps(t[i]));
}

/* Turns a row of scores into exp(score - largest), zero beyond `length`; returns 1 / their sum. */
INLINE float softmax_row(float *scores, int length, int padded) {
    __mmask16 last = (__mmask16)(0xffff >> (padded - length));
    vec least = _mm512_set1_ps(-__builtin_inff()), largest = least, sum = _mm512_setzero_ps();
    for (int i = 0; i < padded; i += LANES) {
        __mmask16 mask = i + LANES < padded ? 0xffff : last;
        largest = _mm512_max_ps(largest, _mm512_mask_mov_ps(least, mask, _mm512_loadu_ps(scores + i)));
    }
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int i = 0; i < padded; i += LANES) {
        __mmask16 mask = i + LANES < padded ? 0xffff : last;
        vec e = _mm512_maskz_mov_ps(mask, exp_vec(_mm512_sub_ps(_mm512_loadu_ps(scores + i), largest)));
        _mm512_storeu_ps(scores + i, e);
        sum = _mm512_add_ps(sum, e);
    }
    return 1.f / _mm512_reduce_add_ps(sum);
}

/* Turns `rows` queries of one text of `length` tokens into their context; the query carries the 1/sqrt(head width). */
static void attend(const Model *m, float *query, int rows, const float *key_value, int length, Scratch *scratch) {
    const int width = m->width, head_width = width / m->heads, padded = (length + LANES - 1) / LANES * LANES;
    for (int head = 0; head < m->heads; head++) {
        const float *key = key_value + head * head_width, *value = key + width;
        for (int token = 0; token < length; token += LANES)
            for (int d = 0; d < head_width; d += LANES)
                transpose_16(key + (size_t)token * 2 * width + d, 2 * width, length - token,
                             scratch->keys + (size_t)d * padded + token, padded);
        for (int part = 0, parts = row_blocks(rows); part < parts; part++) {
            const int row = rows * part / parts, count = rows * (part + 1) / parts - row;
            float *place = query + (size_t)row * width + head * head_width;
            float_product(place, width, scratch->keys, padded, count, padded, head_width, scratch->scores, padded);
            for (int r = 0; r < count; r++)
                scratch->row[r] = softmax_row(scratch->scores + (size_t)r * padded, length, padded);
            float_product(scratch->scores, padded, value, 2 * width, count, head_width, length, place, width);
            for (int r = 0; r < count; r++)
                for (int d = 0; d < head_width; d += LANES) {
                    float *out = place + (size_t)r * width + d;
                    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), _mm512_set1_ps(scratch->row[r])));
                }
        }
    }
}

/* ---------------------------------------------------------------- one thread's share of a call */

static void embed(const Session *s, const Batch *batch, int from, int to) {
    const Model *m = s->model;
    for (int text = 0; text < batch->texts; text++) {
        int begin = batch->starts[text] > from ? batch->starts[text] : from;
        int end = batch->starts[text + 1] < to ? batch->starts[text + 1] : to;
        for (int row = begin; row < end; row++) {
            float *x = s->hidden + (size_t)row * m->width;
            const uint16_t *word = m->words + (size_t)batch->ids[row] * m->width;
            const float *position = m->positions + (size_t)(row - batch->starts[text]) * m->width;
            for (int i = 0; i < m->width; i += LANES) {
                vec w = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(word + i)));
                _mm512_storeu_ps(x + i, _mm512_add_ps(w, _mm512_loadu_ps(position + i)));
            }
            normalise_row(x, m->embedding_norm, m->width, m->norm_epsilon);
            s->scales[row] = quantise_row(x, s->quantised + (size_t)row * m->width, m->width);
        }
    }
}

/* All of a block that follows attention, for up to MOST_ROWS rows; hidden is updated. */
static void after_attention(const Model *m, const Block *block, Scratch *scratch, int rows, const float *context,
                            float *hidden, uint8_t *quantised, RowScale *scales) {
    const int width = m->width;
    for (int r = 0; r < rows; r++)
        scratch->scales[r] = quantise_row(context + (size_t)r * width, scratch->quantised + (size_t)r * width, width);
    linear_add(&block->attention_out, scratch->quantised, scratch->scales, rows, hidden, width);
    for (int r = 0; r < rows; r++) {
        normalise_row(hidden + (size_t)r * width, block->attention_norm, width, m->norm_epsilon);
        scales[r] = quantise_row(hidden + (size_t)r * width, quantised + (size_t)r * width, width);
    }
    (m->activation == GELU ? linear_gelu : linear_relu)(&block->wide, quantised, scales, rows, scratch->wide, m->wide);
    for (int r = 0; r < rows; r++)
        scratch->scales[r] = quantise_row(scratch->wide + (size_t)r * m->wide, scratch->quantised + (size_t)r * m->wide, m->wide);
    linear_add(&block->narrow, scratch->quantised, scratch->scales, rows, hidden, width);
    for (int r = 0; r < rows; r++) {
        normalise_row(hidden + (size_t)r * width, block->output_norm, width, m->norm_epsilon);
        scales[r] = quantise_row(hidden + (size_t)r * width, quantised + (size_t)r * width, width);
    }
}

/* A block for the rows [from, to), once the keys and values of all rows are there. */
static void block_rows(Session *s, const Batch *batch, const Block *block, const float *key_value, int from, int to,
                       Scratch *scratch) {
    const size_t width = s->model->width;
    for (int text = 0; text < batch->texts; text++) {
        const int start = batch->starts[text], stop = batch->starts[text + 1];
        const int begin = start > from ? start : from, end = stop < to ? stop : to;
        if (begin < end)
            attend(s->model, s->query + begin * width, end - begin, key_value + start * 2 * width, stop - start, scratch);
    }
    for (int part = 0, parts = row_blocks(to - from); part < parts; part++) {
        const int row = from + (to - from) * part / parts, rows = from + (to - from) * (part + 1) / parts - row;
        after_attention(s->model, block, scratch, rows, s->query + row * width, s->hidden + row * width,
                        s->quantised + row * width, s->scales + row);
    }
}

/* The last block and the classifier for the texts [from, to): their first tokens alone. */
static void first_tokens(Session *s, const Batch *batch, const Block *block, const float *key_value, int from, int to,
                         Scratch *scratch) {
    const Model *m = s->model;
    const int width = m->width;
    for (int text = from; text < to; text++) {
        const size_t row = batch->starts[text];
        memcpy(s->first + (size_t)text * width, s->hidden + row * width, sizeof(float) * width);
        memcpy(s->first_quantised + (size_t)text * width, s->quantised + row * width, width);
        s->first_scales[text] = s->scales[row];
    }
    for (int part = 0, parts = row_blocks(to - from); part < parts; part++) {
        const int text = from + (to - from) * part / parts, rows = from + (to - from) * (part + 1) / parts - text;
        float *first = s->first + (size_t)text * width, *query = s->query + (size_t)text * width;
        uint8_t *quantised = s->first_quantised + (size_t)text * width;
        linear_store(&block->query, quantised, s->first_scales + text, rows, query, width);
        for (int r = 0; r < rows; r++) {
            const int start = batch->starts[text + r], stop = batch->starts[text + r + 1];
            attend(m, query + (size_t)r * width, 1, key_value + (size_t)start * 2 * width, stop - start, scratch);
        }
        after_attention(m, block, scratch, rows, query, first, quantised, s->first_scales + text);
        float *pooled = s->pooled + (size_t)text * width;
        float_product(first, width, m->pooler_weight, width, rows, width, width, pooled, width);
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < width; i += LANES) {
                vec y = _mm512_add_ps(_mm512_loadu_ps(pooled + (size_t)r * width + i), _mm512_loadu_ps(m->pooler_bias + i));
                y = m->head_is_tanh ? tanh_vec(y) : _mm512_max_ps(_mm512_setzero_ps(), y);
                _mm512_storeu_ps(pooled + (size_t)r * width + i, y);
            }
            for (int label = 0; label < m->labels; label++) {
                vec sum = _mm512_setzero_ps();
                for (int i = 0; i < width; i += LANES)
                    sum = _mm512_fmadd_ps(_mm512_loadu_ps(pooled + (size_t)r * width + i),
                                          _mm512_loadu_ps(m->classifier_weight + (size_t)label * width + i), sum);
                batch->logits[(size_t)(text + r) * m->labels + label] = _mm512_reduce_add_ps(sum) + m->classifier_bias[label];
            }
        }
    }
}

/* All threads of a call meet here. */
static void meet(Session *s, int threads) {
    if (threads == 1) return;
    const int32_t generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) == threads - 1) {
        atomic_store(&s->arrived, 0);
        atomic_fetch_add(&s->generation, 1);
        return;
    }
    for (int spins = 0; atomic_load(&s->generation) == generation; spins++) {
        if (spins < SPINS_BEFORE_YIELD) _mm_pause();
        else sched_yield();
    }
}

static void run_share(Session *s, const Batch *batch, Scratch *scratch, int thread, int threads) {
    const Model *m = s->model;
    const int rows = batch->starts[batch->texts], width = m->width;
    const int from = (int)((int64_t)rows * thread / threads), to = (int)((int64_t)rows * (thread + 1) / threads);
    embed(s, batch, from, to);
    for (int b = 0; b < m->blocks; b++) {
        const Block *block = &m->block[b];
        float *key_value = s->key_value[b % 2];
        const int last = b == m->blocks - 1;
        for (int part = 0, parts = row_blocks(to - from); part < parts; part++) {
            const int row = from + (to - from) * part / parts, count = from + (to - from) * (part + 1) / parts - row;
            const uint8_t *quantised = s->quantised + (size_t)row * width;
            if (!last) linear_store(&block->query, quantised, s->scales + row, count, s->query + (size_t)row * width, width);
            linear_store(&block->key_value, quantised, s->scales + row, count, key_value + (size_t)row * 2 * width, 2 * width);
        }
        meet(s, threads);
        if (last)
            first_tokens(s, batch, block, key_value, batch->texts * thread / threads, batch->texts * (thread + 1) / threads, scratch);
        else
            block_rows(s, batch, block, key_value, from, to, scratch);
    }
    meet(s, threads);
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
    const size_t width = m->width, wide = m->wide, padded = (longest + LANES - 1) / LANES * LANES;
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
        run_share(h->session, h->batch, &h->scratch, h->place, h->threads);
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

/* By the caller, after the last meeting of its call: whoever calls next finds them idle, also one that has yet to lie
 * down to sleep. Such a one sees by the number of its calls that it is wanted again. */
static void return_helpers(Pool *pool, Helper *team) {
    if (!team) return;
    Helper *last = team;
    while (last->next) last = last->next;
    pthread_mutex_lock(&pool->mutex);
    last->next = pool->idle;
    pool->idle = team;
    pthread_mutex_unlock(&pool->mutex);
}

/* Stop the helpers; no call may be under way, and none may follow. Sessions are closed after their pool, since a helper
 * may still be leaving the last meeting of a call, and are the caller's to close. */
void close_pool(Pool *pool) {
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

/* `helpers` threads for the sessions of a model, or as many as the system lets us start; NULL when memory is lacking. */
Pool *open_pool(const Model *model, int32_t helpers) {
    Pool *pool = calloc(1, sizeof(Pool) + (size_t)(helpers > 0 ? helpers : 0) * sizeof(Helper));
    if (!pool) return NULL;
    pool->model = model;
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

void close_session(Session *s) {
    free(s->hidden), free(s->quantised), free(s->scales), free(s->query), free(s->key_value[0]), free(s->key_value[1]);
    free(s->first), free(s->pooled), free(s->first_quantised), free(s->first_scales);
    free_scratch(&s->scratch);
    free(s);
}

/* For the Python side, to see that both mean the same structures. */
int32_t model_bytes(void) { return sizeof(Model); }

/* A session serves one call at a time; NULL when memory is lacking. */
Session *open_session(Pool *pool) {
    Session *s = calloc(1, sizeof(Session));
    if (!s) return NULL;
    s->pool = pool;
    s->model = pool->model;
    return s;
}

/* Fills logits (texts, labels); returns 0, or 1 when memory is lacking. ids and starts are trusted: checked above. */
int32_t forward(Session *s, const int32_t *ids, const int32_t *starts, int32_t texts, int32_t threads, float *logits) {
    const int rows = starts[texts];
    int longest = 0;
    for (int t = 0; t < texts; t++)
        if (starts[t + 1] - starts[t] > longest) longest = starts[t + 1] - starts[t];
    if (!reserve_rows(s, rows) || !reserve_texts(s, texts) || !reserve_scratch(&s->scratch, s->model, longest)) return 1;
    /* Every thread reads all weights, whatever its rows: beyond one thread a tile of rows more threads only read more. */
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, useful = tiles > 2 ? tiles : 2;
    int helpers = 0, fits = 1;
    Helper *team = threads > 1 ? take_helpers(s->pool, (threads < useful ? threads : useful) - 1, &helpers) : NULL;
    for (Helper *h = team; h; h = h->next) fits = fits && reserve_scratch(&h->scratch, s->model, longest);
    if (fits) {
        const Batch batch = {ids, starts, texts, logits};
        if (team) start_helpers(team, s, &batch, helpers + 1);
        run_share(s, &batch, &s->scratch, 0, helpers + 1);
    }
    return_helpers(s->pool, team);
    return !fits;
}
