/* The encoder of a text classifier in int8: whole texts in, logits out. Every instruction set compiles this file over
 * its own primitives (avx2.c, neon.c ...), so the algorithm itself is only here.
 *
 * Texts are stored one after the other, without padding. The linear layers work on the rows (tokens) of all texts at
 * once; only attention needs to know where a text begins and ends. Weights are int8, with one scale per output channel.
 * Activations are quantised to uint8 just before each linear layer, with one scale and one offset per row, so no
 * calibration data is needed. Attention, softmax, GELU, LayerNorm and residuals stay in float32. If the classifier reads
 * only the first token of a text, the last block computes nothing else.
 *
 * The result has the same bits on every processor, for three reasons: sums of int8 products are exact; floats are always
 * added in the same order (16 partial sums, then one half of them is added to the other half, see v_sum); and v_fma
 * rounds once, while nothing else is fused, because the files are compiled with -ffp-contract=off. (The exception is
 * WebAssembly without relaxed SIMD, see wasm.c.)
 *
 * The file of an instruction set includes this one, after it has defined:
 *   vec             16 floats                v_load, v_store, v_splat, v_add, v_sub, v_mul, v_div, v_sqrt, v_round
 *   v_fma(a, b, c)  a b + c, rounded once    v_fnma(a, b, c)  c - a b, rounded once
 *   v_max(a, b)     a > b ? a : b            v_min(a, b)      a < b ? a : b: the second if either is NaN
 *   v_scale(x, n)   x 2^n, for whole n of -126 to 127
 *   v_select(from, to, a, b)  the lanes from <= i < to from a, the others from b
 *   v_sum, v_largest, v_smallest  over the lanes: 8 + 8, then 4 + 4, 2 + 2, 1 + 1
 *   v_load_half     16 float16               v_store_bytes    16 floats, rounded to even, as uint8
 *   ints            16 int32 sums            i_to_float
 *   i_start         the initial value of the sums, computed from the layer's 16 weight sums
 *   activations, weights, four_inputs, four_weights, i_dot  to add four more products to each sum; or all of inner_loop
 *   centred_loop    optional, with CENTRED_LOOP, for tiles of one vector: inner_loop for outputs that have centres
 *   transpose       BLOCK rows of BLOCK floats become columns of out, out_stride apart; rows from `rows` on are read as 0
 *   INT_ROWS x INT_VECTORS, FLOAT_ROWS x FLOAT_VECTORS  how many sums fit into the registers: rows x vectors of 16 outputs
 *   RUN_SHARE       the name of the function that this file defines
 */
#include "model.h"

/* ---------------------------------------------------------------- arithmetic */

/* A limit is always the first operand of v_max or v_min. So NaN stays NaN up to the logits, where it is noticed; as the
 * second operand the limit would replace it. */

/* exp(x) for x <= 88; relative error below 2e-7. */
INLINE vec exp_vec(vec x) {
    x = v_max(v_splat(-87.f), x);
    vec n = v_round(v_mul(x, v_splat(1.44269504f)));
    vec r = v_fnma(n, v_splat(0.693359375f), x);
    r = v_fnma(n, v_splat(-2.12194440e-4f), r);
    vec p = v_splat(1.9875691500e-4f);
    p = v_fma(p, r, v_splat(1.3981999507e-3f));
    p = v_fma(p, r, v_splat(8.3334519073e-3f));
    p = v_fma(p, r, v_splat(4.1665795894e-2f));
    p = v_fma(p, r, v_splat(1.6666665459e-1f));
    p = v_fma(p, r, v_splat(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_splat(1.f)));
    return v_scale(p, n);
}

INLINE vec tanh_vec(vec x) {
    x = v_min(v_splat(15.f), v_max(v_splat(-15.f), x));
    vec e = exp_vec(v_add(x, x));
    return v_div(v_sub(e, v_splat(1.f)), v_add(e, v_splat(1.f)));
}

/* x Phi(x), Phi by a polynomial in x^2 (minimax on |x| <= 4): error below 2e-4, a sixtieth of the step of int8 after it. */
INLINE vec gelu_vec(vec x) {
    vec near = v_min(v_splat(4.f), v_max(v_splat(-4.f), x));
    vec square = v_mul(near, near);
    vec p = v_splat(2.2779904185e-8f);
    p = v_fma(p, square, v_splat(-1.5985249319e-6f));
    p = v_fma(p, square, v_splat(4.7954006732e-5f));
    p = v_fma(p, square, v_splat(-8.1400107592e-4f));
    p = v_fma(p, square, v_splat(8.7723201141e-3f));
    p = v_fma(p, square, v_splat(-6.4572960138e-2f));
    p = v_fma(p, square, v_splat(3.9788323641e-1f));
    return v_mul(x, v_fma(p, near, v_splat(0.5f)));
}

INLINE vec activated(enum Activation activation, vec x) {
    if (activation == GELU) return gelu_vec(x);
    return activation == TANH ? tanh_vec(x) : v_max(v_splat(0.f), x);
}

/* ---------------------------------------------------------------- rows */

/* A byte cannot be NaN or infinite, so a row that has either gets NaN as its scale, and everything after it is NaN. */
INLINE RowScale quantise_row(const float *x, uint8_t *q, int width) {
    vec low = v_load(x), high = low, spoilt = v_mul(low, v_splat(0.f)); /* 0, or NaN */
    for (int i = LANES; i < width; i += LANES) {
        vec v = v_load(x + i);
        low = v_min(low, v);
        high = v_max(high, v);
        spoilt = v_fma(v, v_splat(0.f), spoilt);
    }
    float smallest = v_smallest(low), range = v_largest(high) - smallest;
    RowScale scale = {.scale = range / ACTIVATION_MAX + v_sum(spoilt), .offset = smallest};
    vec inverse = v_splat(range > 0.f ? ACTIVATION_MAX / range : 0.f), offset = v_splat(smallest);
    for (int i = 0; i < width; i += LANES) v_store_bytes(q + i, v_mul(v_sub(v_load(x + i), offset), inverse));
#ifdef ROW_SUM
    scale.sum = row_sum(q, width);
#endif
    return scale;
}

/* LayerNorm of a row, written to `out`, which may be the row itself. */
INLINE void normalise_row(const float *x, Norm norm, int width, float epsilon, float *out) {
    vec sum = v_splat(0.f), squares = sum;
    for (int i = 0; i < width; i += LANES) sum = v_add(sum, v_load(x + i));
    vec mean = v_splat(v_sum(sum) / (float)width);
    for (int i = 0; i < width; i += LANES) {
        vec d = v_sub(v_load(x + i), mean);
        squares = v_fma(d, d, squares);
    }
    float variance = v_sum(squares) / (float)width;
    vec factor = v_div(v_splat(1.f), v_sqrt(v_splat(variance + epsilon)));
    for (int i = 0; i < width; i += LANES) {
        vec d = v_mul(v_sub(v_load(x + i), mean), factor);
        v_store(out + i, v_fma(d, v_load(norm.gain + i), v_load(norm.bias + i)));
    }
}

/* Rotates the features i and i + half of every head of a row by the angles of its position (RoPE). */
INLINE void rotate_row(float *x, const float *rotation, int width, int head_width) {
    const int half = head_width / 2;
    for (int head = 0; head < width; head += head_width)
        for (int i = 0; i < half; i += LANES) {
            vec cosine = v_load(rotation + i), sine = v_load(rotation + half + i);
            vec a = v_load(x + head + i), b = v_load(x + head + half + i);
            v_store(x + head + i, v_fnma(b, sine, v_mul(a, cosine)));
            v_store(x + head + half + i, v_fma(a, sine, v_mul(b, cosine)));
        }
}

/* Into how many parts of near-equal height rows are divided, at most MOST_ROWS each. */
INLINE int num_parts(int rows) { return rows < MOST_ROWS ? rows > 0 : (rows + ROW_BLOCK / 2) / ROW_BLOCK; }

/* Where the part-th of `parts` near-equal parts of n begins. */
INLINE int part_start(int n, int part, int parts) { return (int)((int64_t)n * part / parts); }

/* ---------------------------------------------------------------- matrix products */

enum Epilogue { STORE, STORE_GELU, STORE_RELU, ADD, MULTIPLY };

#ifndef OWN_INNER_LOOP
/* sum (rows, 16 vectors) += the products over all inputs. */
INLINE void inner_loop(const int rows, const int vectors, const int8_t *weight, const uint8_t *q, int inputs,
                       ints sum[][INT_VECTORS]) {
    for (int k = 0; k < inputs; k += 4) {
        weights w[INT_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) w[v] = four_weights(weight + (size_t)v * LANES * inputs + k * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            activations x = four_inputs(q + (size_t)r * inputs + k);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = i_dot(sum[r][v], x, w[v]);
        }
    }
}
#endif

#ifdef CENTRED_LOOP
/* The centres of the 16 outputs from `column` on, or NULL. */
INLINE const int16_t *centres_of(const Linear *layer, int column) {
    if (!layer->centres) return NULL;
    const int16_t *centres = layer->centres + (size_t)column * 2 * (layer->inputs / CENTRED);
    return *centres == NO_CENTRES ? NULL : centres;
}
#endif

/* A tile's height must be a constant if its sums are to stay in registers. */
#ifdef ANY_HEIGHT
#define UNROLL_ROWS
#else
#define UNROLL_ROWS UNROLL
#endif

/* One tile: `rows` rows x 16 `vectors` outputs in registers, over all inputs. */
INLINE void linear_tile(const int rows, const int vectors, const enum Epilogue epilogue, const Linear *layer, int column,
                        const uint8_t *q, const RowScale *scales, float *out, int out_stride) {
    const int inputs = layer->inputs;
    const int8_t *weight = layer->weight + (size_t)column * inputs;
    ints sum[INT_ROWS][INT_VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) {
        ints start = i_start(layer->weight_sum + column + v * LANES);
        UNROLL_ROWS for (int r = 0; r < rows; r++) sum[r][v] = start;
    }
#ifdef ROW_SUM
    UNROLL_ROWS for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = row_start(sum[r][v], scales[r].sum);
#endif
#ifdef CENTRED_LOOP
    const int16_t *centres = centres_of(layer, column);
    if (centres) centred_loop(rows, layer, column, centres, q, sum);
    else
#endif
        inner_loop(rows, vectors, weight, q, inputs, sum);
    UNROLL for (int v = 0; v < vectors; v++) {
        const int at = column + v * LANES;
        vec scale = v_load(layer->scale + at), bias = v_load(layer->bias + at);
        vec shift = v_mul(scale, i_to_float(i_load(layer->weight_sum + at)));
        UNROLL_ROWS for (int r = 0; r < rows; r++) {
            float *place = out + (size_t)r * out_stride + at;
            vec y = v_fma(v_splat(scales[r].offset), shift, bias);
            y = v_fma(i_to_float(sum[r][v]), v_mul(v_splat(scales[r].scale), scale), y);
            if (epilogue == STORE_GELU) y = gelu_vec(y);
            if (epilogue == STORE_RELU) y = v_max(v_splat(0.f), y);
            if (epilogue == ADD) y = v_add(y, v_load(place));
            if (epilogue == MULTIPLY) y = v_mul(y, v_load(place));
            v_store(place, y);
        }
    }
}

/* All rows for 16 x `vectors` outputs, in tiles of equal height: one last row on its own would cost a whole tile. */
INLINE void linear_strip(const int vectors, const enum Epilogue epilogue, const Linear *layer, int column,
                         const uint8_t *q, const RowScale *scales, int rows, float *out, int out_stride) {
    for (int tile = 0, tiles = (rows + INT_ROWS - 1) / INT_ROWS; tile < tiles; tile++) {
        const int row = part_start(rows, tile, tiles), height = part_start(rows, tile + 1, tiles) - row;
#ifdef ANY_HEIGHT
        linear_tile(height, vectors, epilogue, layer, column, q + (size_t)row * layer->inputs, scales + row,
                    out + (size_t)row * out_stride, out_stride);
#else
        BY_HEIGHT(height, INT_ROWS, linear_tile, vectors, epilogue, layer, column, q + (size_t)row * layer->inputs, scales + row,
                  out + (size_t)row * out_stride, out_stride)
#endif
    }
}

/* out (rows, outputs) =, += or *= q W^T + bias. */
INLINE void linear(const enum Epilogue epilogue, const Linear *layer, const uint8_t *q, const RowScale *scales,
                   int rows, float *out, int out_stride) {
    int column = 0;
    for (; column + INT_VECTORS * LANES <= layer->outputs; column += INT_VECTORS * LANES)
        linear_strip(INT_VECTORS, epilogue, layer, column, q, scales, rows, out, out_stride);
    for (; column < layer->outputs; column += LANES)
        linear_strip(1, epilogue, layer, column, q, scales, rows, out, out_stride);
}

#define LINEAR(NAME, EPILOGUE)                                                                                    \
    NOINLINE void NAME(const Linear *l, const uint8_t *q, const RowScale *s, int rows, float *out, int stride) {  \
        linear(EPILOGUE, l, q, s, rows, out, stride);                                                             \
    }
LINEAR(linear_store, STORE)
LINEAR(linear_gelu, STORE_GELU)
LINEAR(linear_relu, STORE_RELU)
LINEAR(linear_add, ADD)
LINEAR(linear_multiply, MULTIPLY)

INLINE void float_tile(const int rows, const int vectors, const float *a, int a_stride, const float *b, int b_stride,
                       int inner, float *out, int out_stride) {
    vec sum[FLOAT_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = v_splat(0.f);
    for (int k = 0; k < inner; k++, b += b_stride) {
        vec w[4];
        UNROLL for (int v = 0; v < vectors; v++) w[v] = v_load(b + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec x = v_splat(a[(size_t)r * a_stride + k]);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = v_fma(x, w[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) v_store(out + (size_t)r * out_stride + v * LANES, sum[r][v]);
}

INLINE void float_strip(const int vectors, const float *a, int a_stride, const float *b, int b_stride, int rows,
                        int inner, float *out, int out_stride) {
    for (int tile = 0, tiles = (rows + FLOAT_ROWS - 1) / FLOAT_ROWS; tile < tiles; tile++) {
        const int row = part_start(rows, tile, tiles), height = part_start(rows, tile + 1, tiles) - row;
        BY_HEIGHT(height, FLOAT_ROWS, float_tile, vectors, a + (size_t)row * a_stride, a_stride, b, b_stride, inner,
                  out + (size_t)row * out_stride, out_stride)
    }
}

/* out (rows, columns) = a (rows, inner) b (inner, columns); columns a multiple of 16. */
NOINLINE void float_product(const float *a, int a_stride, const float *b, int b_stride, int rows, int columns,
                            int inner, float *out, int out_stride) {
    int column = 0;
    for (; column + FLOAT_VECTORS * LANES <= columns; column += FLOAT_VECTORS * LANES)
        float_strip(FLOAT_VECTORS, a, a_stride, b + column, b_stride, rows, inner, out + column, out_stride);
    for (; FLOAT_VECTORS > 2 && column + 2 * LANES <= columns; column += 2 * LANES) /* heads of width 32, as in MiniLM */
        float_strip(2, a, a_stride, b + column, b_stride, rows, inner, out + column, out_stride);
    for (; column < columns; column += LANES)
        float_strip(1, a, a_stride, b + column, b_stride, rows, inner, out + column, out_stride);
}

/* ---------------------------------------------------------------- attention */

/* The lanes of x, which begin at `column`: those in the columns [from, to) as they are, the others are `other`. */
INLINE vec inside(vec x, int column, int from, int to, vec other) {
    if (from <= column && column + LANES <= to) return x;
    return v_select(from - column, to - column, x, other);
}

/* Turns the scores of the columns [from, to) into exp(score - largest), and all others of the `columns` into zero;
 * returns 1 / their sum. */
INLINE float softmax_row(float *scores, int columns, int from, int to) {
    vec largest = v_splat(-__builtin_inff()), sum = v_splat(0.f);
    for (int i = 0; i < columns; i += LANES)
        largest = v_max(largest, inside(v_load(scores + i), i, from, to, v_splat(-__builtin_inff())));
    largest = v_splat(v_largest(largest));
    for (int i = 0; i < columns; i += LANES) {
        vec e = inside(exp_vec(v_sub(v_load(scores + i), largest)), i, from, to, v_splat(0.f));
        v_store(scores + i, e);
        sum = v_add(sum, e);
    }
    return 1.f / v_sum(sum);
}

/* out (16 columns, out_stride apart) = transpose of 16 rows of 16 floats; rows beyond `rows` read 0. */
INLINE void transpose_16(const float *x, int x_stride, int rows, float *out, int out_stride) {
    for (int i = 0; i < LANES; i += BLOCK)
        for (int j = 0; j < LANES; j += BLOCK)
            transpose(x + (size_t)i * x_stride + j, x_stride, rows - i, out + (size_t)j * out_stride + i, out_stride);
}

INLINE int at_least(int limit, int x) { return x > limit ? x : limit; }
INLINE int at_most(int limit, int x) { return x < limit ? x : limit; }

/* Replaces the queries of the tokens [from, to) of a text of `length` tokens by their context. `query` is the query of
 * the token `from`, already divided by sqrt(head width); `key_value` belongs to the text's first token. */
static void attend(const Model *m, const Block *block, float *query, int from, int to, const float *key_value,
                   int length, Scratch *scratch) {
    const int width = m->width, head_width = width / m->heads;
    const int window = block->window > 0 && block->window < length ? block->window : length;
    /* The columns that these queries see begin at a multiple of 16, so each token is in the same partial sum for all. */
    const int seen = at_least(0, from - window) / LANES * LANES, end = at_most(length, to + window);
    const int padded = (end - seen + LANES - 1) / LANES * LANES;
    for (int head = 0; head < m->heads; head++) {
        const float *key = key_value + head * head_width, *value = key + width;
        for (int token = seen; token < end; token += LANES)
            for (int d = 0; d < head_width; d += LANES)
                transpose_16(key + (size_t)token * 2 * width + d, 2 * width, length - token,
                             scratch->keys + (size_t)d * padded + token - seen, padded);
        for (int part = 0, parts = num_parts(to - from); part < parts; part++) {
            const int token = from + part_start(to - from, part, parts);
            const int rows = from + part_start(to - from, part + 1, parts) - token;
            /* The columns of these rows, again from a multiple of 16. */
            const int first = at_least(0, token - window) / LANES * LANES;
            const int columns = (at_most(length, token + rows + window) - first + LANES - 1) / LANES * LANES;
            float *place = query + (size_t)(token - from) * width + head * head_width, *scores = scratch->scores;
            float_product(place, width, scratch->keys + first - seen, padded, rows, columns, head_width, scores, columns);
            for (int r = 0; r < rows; r++) {
                float *row = scores + (size_t)r * columns;
                const int low = at_least(0, token + r - window), high = at_most(length, token + r + window + 1);
                if (m->distances) {
                    const size_t stride = 2 * (size_t)m->num_positions + LANES;
                    const float *bias = m->distances + head * stride + m->num_positions - 1 + first - (token + r);
                    for (int i = 0; i < columns; i += LANES) v_store(row + i, v_add(v_load(row + i), v_load(bias + i)));
                }
                scratch->row[r] = softmax_row(row, columns, low - first, high - first);
            }
            float_product(scores, columns, value + (size_t)first * 2 * width, 2 * width, rows, head_width,
                          at_most(columns, length - first), place, width);
            for (int r = 0; r < rows; r++)
                for (int d = 0; d < head_width; d += LANES) {
                    float *out = place + (size_t)r * width + d;
                    v_store(out, v_mul(v_load(out), v_splat(scratch->row[r])));
                }
        }
    }
}

/* ---------------------------------------------------------------- one thread's share of a call */

/* The hidden states that enter the first block, of the rows [from, to). */
static void embed(const Session *s, const Batch *batch, Scratch *scratch, int from, int to) {
    const Model *m = s->model;
    const int width = m->embedding_width, is_projected = m->projection.weight != NULL;
    int waiting = 0; /* rows in the scratch that still have to be projected; the last of them is just before `row` */
    for (int text = 0; text < batch->texts; text++) {
        const int start = batch->starts[text], end = at_most(to, batch->starts[text + 1]);
        int paddings = 0; /* before the row */
        for (int row = start; row < end; row++) {
            const int32_t id = batch->ids[row] & ~SECOND_TEXT;
            const int is_padding = id == m->padding_id;
            paddings += is_padding;
            if (row < from) continue;
            float *x = is_projected ? scratch->wide + (size_t)waiting * width : s->hidden + (size_t)row * m->width;
            const uint16_t *word = m->words + (size_t)id * width;
            for (int i = 0; i < width; i += LANES) v_store(x + i, v_load_half(word + i));
            if (m->positions) {
                /* If there is a padding id, the table's first row is only for it, and positions are counted without it. */
                int place = is_padding ? 0 : row - start - paddings + (m->padding_id >= 0);
                if (batch->ids[row] & SECOND_TEXT) place += m->num_positions + (m->padding_id >= 0);
                const float *position = m->positions + (size_t)place * width;
                for (int i = 0; i < width; i += LANES) v_store(x + i, v_add(v_load(x + i), v_load(position + i)));
            }
            normalise_row(x, m->embedding_norm, width, m->norm_epsilon, x);
            if (is_projected) {
                scratch->scales[waiting] = quantise_row(x, scratch->quantised + (size_t)waiting * width, width);
                if (++waiting < MOST_ROWS && row < to - 1) continue;
                float *hidden = s->hidden + (size_t)(row + 1 - waiting) * m->width;
                linear_store(&m->projection, scratch->quantised, scratch->scales, waiting, hidden, m->width);
                waiting = 0;
            }
        }
    }
    for (int row = from; row < to; row++)
        s->scales[row] = quantise_row(s->hidden + (size_t)row * m->width, s->quantised + (size_t)row * m->width, m->width);
}

/* Prepares rows for the next linear layer: normalised and quantised. The hidden row is replaced by the normalised one;
 * in a model that normalises first, only if no block follows. */
INLINE void normalise_rows(const Model *m, Norm norm, int keeps_hidden, int rows, float *hidden, float *spare,
                           uint8_t *quantised, RowScale *scales) {
    const int width = m->width;
    for (int r = 0; r < rows; r++) {
        float *row = hidden + (size_t)r * width, *out = keeps_hidden ? spare : row;
        normalise_row(row, norm, width, m->norm_epsilon, out);
        scales[r] = quantise_row(out, quantised + (size_t)r * width, width);
    }
}

/* The part of a block after attention, for up to MOST_ROWS rows; updates hidden. */
static void after_attention(const Model *m, const Block *block, Scratch *scratch, int rows, const float *context,
                            float *hidden, uint8_t *quantised, RowScale *scales) {
    const int width = m->width, wide = m->wide, is_last = block == m->block + m->blocks - 1;
    for (int r = 0; r < rows; r++)
        scratch->scales[r] = quantise_row(context + (size_t)r * width, scratch->quantised + (size_t)r * width, width);
    linear_add(&block->attention_out, scratch->quantised, scratch->scales, rows, hidden, width);
    normalise_rows(m, block->attention_norm, m->norm_first, rows, hidden, scratch->wide, quantised, scales);
    const Linear *activated = m->is_gated ? &block->gate : &block->wide;
    (m->activation == GELU ? linear_gelu : linear_relu)(activated, quantised, scales, rows, scratch->wide, wide);
    if (m->is_gated) linear_multiply(&block->wide, quantised, scales, rows, scratch->wide, wide);
    for (int r = 0; r < rows; r++)
        scratch->scales[r] = quantise_row(scratch->wide + (size_t)r * wide, scratch->quantised + (size_t)r * wide, wide);
    linear_add(&block->narrow, scratch->quantised, scratch->scales, rows, hidden, width);
    normalise_rows(m, block->output_norm, m->norm_first && !is_last, rows, hidden, scratch->wide, quantised, scales);
}

/* Queries, keys and values of the rows [from, to). */
static void project(Session *s, const Batch *batch, const Block *block, float *key_value, int needs_query, int from,
                    int to) {
    const Model *m = s->model;
    const size_t width = m->width;
    for (int part = 0, parts = num_parts(to - from); part < parts; part++) {
        const int row = from + part_start(to - from, part, parts);
        const int rows = from + part_start(to - from, part + 1, parts) - row;
        const uint8_t *quantised = s->quantised + row * width;
        if (needs_query) linear_store(&block->query, quantised, s->scales + row, rows, s->query + row * width, m->width);
        linear_store(&block->key_value, quantised, s->scales + row, rows, key_value + row * 2 * width, 2 * m->width);
    }
    if (!block->rotation) return;
    const int head_width = m->width / m->heads;
    for (int text = 0; text < batch->texts; text++) {
        const int start = batch->starts[text], end = at_most(to, batch->starts[text + 1]);
        for (int row = at_least(from, start); row < end; row++) {
            const float *rotation = block->rotation + (size_t)(row - start) * head_width;
            if (needs_query) rotate_row(s->query + row * width, rotation, m->width, head_width);
            rotate_row(key_value + row * 2 * width, rotation, m->width, head_width);
        }
    }
}

/* A block for the rows [from, to), after the keys and values of all rows have been computed. */
static void block_rows(Session *s, const Batch *batch, const Block *block, const float *key_value, int from, int to,
                       Scratch *scratch) {
    const size_t width = s->model->width;
    for (int text = 0; text < batch->texts; text++) {
        const int start = batch->starts[text], stop = batch->starts[text + 1];
        const int begin = at_least(from, start), end = at_most(to, stop);
        if (begin < end)
            attend(s->model, block, s->query + begin * width, begin - start, end - start, key_value + start * 2 * width,
                   stop - start, scratch);
    }
    for (int part = 0, parts = num_parts(to - from); part < parts; part++) {
        const int row = from + part_start(to - from, part, parts);
        const int rows = from + part_start(to - from, part + 1, parts) - row;
        after_attention(s->model, block, scratch, rows, s->query + row * width, s->hidden + row * width,
                        s->quantised + row * width, s->scales + row);
    }
}

/* The last block for the first tokens of the texts [from, to); the other tokens are not read any more. */
static void first_tokens(Session *s, const Batch *batch, const Block *block, const float *key_value, int from, int to,
                         Scratch *scratch) {
    const Model *m = s->model;
    const size_t width = m->width;
    for (int text = from; text < to; text++) {
        const size_t row = batch->starts[text];
        memcpy(s->first + text * width, s->hidden + row * width, sizeof(float) * width);
        memcpy(s->first_quantised + text * width, s->quantised + row * width, width);
        s->first_scales[text] = s->scales[row];
    }
    for (int part = 0, parts = num_parts(to - from); part < parts; part++) {
        const int text = from + part_start(to - from, part, parts);
        const int rows = from + part_start(to - from, part + 1, parts) - text;
        float *first = s->first + text * width, *query = s->query + text * width;
        uint8_t *quantised = s->first_quantised + text * width;
        /* Rotary positions leave the query of position 0 as it is. */
        linear_store(&block->query, quantised, s->first_scales + text, rows, query, m->width);
        for (int r = 0; r < rows; r++) {
            const size_t start = batch->starts[text + r], stop = batch->starts[text + r + 1];
            attend(m, block, query + r * width, 0, 1, key_value + start * 2 * width, (int)(stop - start), scratch);
        }
        after_attention(m, block, scratch, rows, query, first, quantised, s->first_scales + text);
    }
}

/* The mean of all tokens of the texts [from, to). */
static void mean_tokens(Session *s, const Batch *batch, int from, int to) {
    const int width = s->model->width;
    for (int text = from; text < to; text++) {
        const int start = batch->starts[text], stop = batch->starts[text + 1];
        vec count = v_splat((float)(stop - start));
        for (int i = 0; i < width; i += LANES) {
            vec sum = v_splat(0.f);
            for (int row = start; row < stop; row++) sum = v_add(sum, v_load(s->hidden + (size_t)row * width + i));
            v_store(s->first + (size_t)text * width + i, v_div(sum, count));
        }
    }
}

/* The pooler, for the texts [from, to). */
static void pool(Session *s, const Classifier *own, int from, int to) {
    const Model *m = s->model;
    const int width = m->width;
    const float *first = s->first + (size_t)from * width;
    float *pooled = s->pooled + (size_t)from * width;
    if (!own->is_diagonal) float_product(first, width, own->pooler_weight, width, to - from, width, width, pooled, width);
    for (int text = from; text < to; text++, first += width, pooled += width) {
        for (int i = 0; i < width; i += LANES) {
            /* The same bits as the product with a matrix that is zero elsewhere. */
            vec x = own->is_diagonal ? v_mul(v_load(first + i), v_load(own->pooler_weight + i)) : v_load(pooled + i);
            v_store(pooled + i, activated(m->head_activation, v_add(x, v_load(own->pooler_bias + i))));
        }
        if (own->norm.gain) normalise_row(pooled, own->norm, width, m->norm_epsilon, pooled);
    }
}

static int has_pooler_of(const Classifier *own, const Classifier *other) {
    return own->pooler_weight == other->pooler_weight && own->pooler_bias == other->pooler_bias &&
           own->norm.gain == other->norm.gain && own->norm.bias == other->norm.bias;
}

/* From the first token or the mean of the texts [from, to) to the logits of all models. */
static void classify(Session *s, const Batch *batch, int from, int to) {
    const Model *m = s->model;
    const int width = m->width;
    const Classifier *end = m->classifier + m->models;
    int column = 0;
    for (const Classifier *own = m->classifier; own < end; column += own++->labels) {
        /* Python puts models with the same pooler next to each other. */
        if (own == m->classifier || !has_pooler_of(own, own - 1)) pool(s, own, from, to);
        for (int text = from; text < to; text++) {
            const float *pooled = s->pooled + (size_t)text * width;
            float *logits = batch->logits + (size_t)text * m->labels + column;
            /* Each label is a sum of its own, so its bits do not depend on what other labels and models there are. */
            for (int label = 0; label < own->labels; label++) {
                const float *weight = own->weight + (size_t)label * width;
                vec sum = v_splat(0.f);
                for (int i = 0; i < width; i += LANES) sum = v_fma(v_load(pooled + i), v_load(weight + i), sum);
                logits[label] = v_sum(sum) + own->bias[label];
            }
        }
    }
}

void RUN_SHARE(Session *s, const Batch *batch, Scratch *scratch, int thread, int threads) {
    const Model *m = s->model;
    const int rows = batch->starts[batch->texts];
    const int from = part_start(rows, thread, threads), to = part_start(rows, thread + 1, threads);
    const int text = part_start(batch->texts, thread, threads), text_end = part_start(batch->texts, thread + 1, threads);
    embed(s, batch, scratch, from, to);
    for (int b = 0; b < m->blocks; b++) {
        const Block *block = &m->block[b];
        float *key_value = s->key_value[b % 2];
        const int only_first = b == m->blocks - 1 && !m->mean_pool;
        project(s, batch, block, key_value, !only_first, from, to);
        meet(s, threads);
        if (only_first) first_tokens(s, batch, block, key_value, text, text_end, scratch);
        else block_rows(s, batch, block, key_value, from, to, scratch);
    }
    if (m->mean_pool) {
        meet(s, threads);
        mean_tokens(s, batch, text, text_end);
    }
    if (text < text_end) classify(s, batch, text, text_end);
    meet(s, threads);
}
