/* The structures that all files here share. library.py declares those that Python fills. */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 8")

/* A tile's height must be a constant, or its sums would not stay in registers. No tile is higher than MOST: the
 * cases from MOST on fall through to the default, so that this tile is compiled only once. */
#define HEIGHT_CASE(HEIGHT, MOST, TILE, ...) \
    case HEIGHT:                             \
        if (HEIGHT < MOST) {                 \
            TILE(HEIGHT, __VA_ARGS__);       \
            break;                           \
        }                                    \
        __attribute__((fallthrough));
#define BY_HEIGHT(HEIGHT, MOST, TILE, ...)      \
    switch (HEIGHT) {                           \
        HEIGHT_CASE(1, MOST, TILE, __VA_ARGS__) \
        HEIGHT_CASE(2, MOST, TILE, __VA_ARGS__) \
        HEIGHT_CASE(3, MOST, TILE, __VA_ARGS__) \
        HEIGHT_CASE(4, MOST, TILE, __VA_ARGS__) \
        HEIGHT_CASE(5, MOST, TILE, __VA_ARGS__) \
    default: TILE(MOST, __VA_ARGS__);           \
    }

/* The code between TARGET_BEGIN and TARGET_END is compiled for a processor that has these features. */
#define PRAGMA(X) _Pragma(#X)
#ifdef __clang__
#define TARGET_BEGIN(FEATURES) PRAGMA(clang attribute push(__attribute__((target(FEATURES))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#else
#define TARGET_BEGIN(FEATURES) PRAGMA(GCC push_options) PRAGMA(GCC target(FEATURES))
#define TARGET_END PRAGMA(GCC pop_options)
#endif

/* How many floats one step of the computation processes, on registers of any width. A sum over a row is kept as 16 partial
 * sums on every processor, so it is equal to the last bit. */
enum { LANES = 16 };
/* How many rows go through a whole block together: their widest activation (rows x 3072 floats) stays in the L2 cache. Up
 * to half more are allowed, so that a text of 50 tokens does not read all weights again for its last two. */
enum { ROW_BLOCK = 48, MOST_ROWS = ROW_BLOCK * 3 / 2 };

/* Activations are quantised to 0 to 182 and weights to -45 to 45, so that four products fit into 16 bits: a processor
 * without VNNI then widens to 32 bits once per eight inputs. This is as exact as 0 to 255 and -63 to 63, of which only
 * two products fit: rows have outliers, so they need more levels than the weights of an output. */
enum { ACTIVATION_MAX = 182, WEIGHT_MAX = 45, ACTIVATION_CENTRE = ACTIVATION_MAX / 2 };
_Static_assert(4 * ACTIVATION_MAX * WEIGHT_MAX <= INT16_MAX, "four products must fit into int16");

/* y = x W^T + bias with int8 weights, packed as [outputs / 16][inputs / 4][16][4]. */
typedef struct {
    int32_t outputs, inputs;
    const int8_t *weight;
    const float *scale;        /* (outputs,) */
    const int32_t *weight_sum; /* (outputs,): sum of the output's weights */
    const float *bias;         /* (outputs,) */
    /* (outputs / 16, inputs / CENTRED, 32), or NULL: see fill_centres in kernels.c. */
    const int16_t *centres;
} Linear;

/* How many inputs share a centre, and what the first centre of 16 outputs is if they have none. */
enum { CENTRED = 32, NO_CENTRES = INT16_MIN };

typedef struct {
    const float *gain, *bias;
} Norm;

typedef struct {
    Linear query, key_value, attention_out, wide, gate, narrow; /* gate: if is_gated */
    Norm attention_norm, output_norm;
    const float *rotation; /* (positions, head width): cosines and then sines of the rotary positions, or NULL */
    int32_t window;        /* a token sees so many to either side of it; 0: all */
} Block;

enum Activation { GELU = 0, RELU = 1, TANH = 2 };

/* The layers behind the encoder, which turn what it says of a text into the scores of a model's labels. */
typedef struct {
    int32_t labels;
    int32_t is_diagonal; /* the pooler multiplies each feature by a number of its own */
    const float *pooler_weight, *pooler_bias; /* (width, width) input-major, or if diagonal (width,); (width,) */
    Norm norm;                                /* before the classifier; gain is NULL where there is none */
    const float *weight, *bias;               /* of the classifier: (labels, width), (labels,) */
} Classifier;

typedef struct {
    int32_t blocks, width, wide, heads, embedding_width, num_positions;
    int32_t models, labels; /* how many models share the encoder, and their labels together */
    int32_t activation, head_activation; /* enum Activation */
    /* A block normalises what enters its two halves, and adds to what was there before (ModernBERT), or else normalises
     * what it has added (BERT). */
    int32_t norm_first;
    int32_t is_gated;   /* the feed-forward takes activation(gate) x wide instead of activation(wide) */
    int32_t mean_pool;  /* the head reads the mean of a text's tokens, not the first one */
    int32_t padding_id; /* gets the position 0, and does not count in the positions of others; -1: no such token */
    float norm_epsilon;
    const uint16_t *words;    /* float16 (vocabulary, embedding width) */
    /* (positions, embedding width), token type 0 added where the model has types, or NULL; for pairs of texts the same
     * again with token type 1 */
    const float *positions;
    Norm embedding_norm;
    Linear projection;        /* from embedding width to width; weight is NULL where they are equal */
    /* (heads, 2 positions + 16): what a score gets by the key's position minus the query's, plus positions - 1; or NULL */
    const float *distances;
    const Block *block;
    const Classifier *classifier; /* of each model */
} Model;

/* Marks the ids of a pair's second text, for models that have a token type for it. */
enum { SECOND_TEXT = 1 << 30 };

typedef struct {
    const int32_t *ids;    /* (rows,) */
    const int32_t *starts; /* (texts + 1,): first row of each text, then the number of rows */
    int32_t texts;
    float *logits; /* (texts, labels), the models' labels one after another */
} Batch;

/* A quantised row is scale x q + offset. `sum` is that of its bytes, where an instruction set asks for it (ROW_SUM). */
typedef struct {
    float scale, offset;
    int32_t sum;
} RowScale;

/* What one thread works on: MOST_ROWS rows of everything. */
typedef struct {
    int32_t longest; /* text that fits */
    float *wide, *scores, *keys, *row;
    uint8_t *quantised;
    RowScale *scales;
} Scratch;

typedef struct Session {
    struct Pool *pool;
    const Model *model;
    int32_t row_capacity, text_capacity;
    float *hidden;         /* (rows, width) */
    uint8_t *quantised;    /* (rows, width) */
    RowScale *scales;      /* (rows,) */
    float *query;          /* (rows, width); attention turns each query into its context in place */
    float *key_value[2];   /* (rows, 2 width); two, so that a fast thread may start the next block */
    float *first, *pooled; /* (texts, width) */
    uint8_t *first_quantised;
    RowScale *first_scales;
    Scratch scratch; /* of the thread that calls */
    _Atomic int32_t arrived, generation;
} Session;

/* All threads of a call meet here. */
void meet(Session *session, int threads);

/* One thread's share of a call: every file of an instruction set makes its own of encoder.h. */
typedef void RunShare(Session *, const Batch *, Scratch *, int thread, int threads);
