/* The C interface of the CPU kernels: pointers and sizes, no exception crosses it.
 *
 * Shapes: x[m, k], w[n, k], y[m, n], all dense in their last dimension; strides count elements.
 * Every function that computes takes the number of threads that it may use. Functions return AP_OK or the
 * reason that they did nothing: no output is touched in that case. */
#ifndef ACCELPATCH_CPU_H
#define ACCELPATCH_CPU_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

enum { AP_OK = 0, AP_BAD_ARGUMENT = 1, AP_NO_MEMORY = 2, AP_UNSUPPORTED = 3 };
enum { AP_ISA_PORTABLE = 0, AP_ISA_AVX2 = 1, AP_ISA_AVX512 = 2, AP_ISA_DOTPROD = 3 };
enum { AP_FLOAT32 = 0, AP_BFLOAT16 = 1, AP_FLOAT16 = 2 };     /* element types of x and y */
enum { AP_NO_OFFSET = 0, AP_MINIMUM = 1, AP_ZERO_POINT = 2 }; /* of AP_INT4 and AP_INT3 */
/* formats of a KV cache; PAGES: float32 [pages, kv_heads, head_dim], and a call says where its slots lie */
enum { AP_CACHE_FLOAT = 0, AP_CACHE_BF16 = 1, AP_CACHE_INT8 = 2, AP_CACHE_FP8 = 3, AP_CACHE_PAGES = 4 };
/* activations; CLAMPED is of experts alone: (up + 1) gate / (1 + e^(-alpha gate)), gate at most `limit`, up within
 * -limit .. limit (gpt-oss) */
enum { AP_SILU = 0, AP_GELU = 1, AP_GELU_TANH = 2, AP_RELU = 3, AP_CLAMPED = 4 };
enum {
    AP_DENSE = 0,
    AP_INT8 = 1,
    AP_INT4 = 2,
    AP_W8A8 = 3,
    AP_TABLE = 4,
    AP_Q4_K = 5,
    AP_Q6_K = 6,
    AP_INT3 = 7
}; /* kinds of a weight */
enum {
    AP_MAX_BATCH = 8,
    AP_MAX_THREADS = 64,
    AP_ROWS = 16,
    AP_COLUMNS = 32,
    AP_MAX_EXPERTS = 1024,
    AP_MAX_CHOSEN = 64
};

/* A weight. AP_DENSE: data is float32 [n, k]. The others: data is a pack (see layout.h).
 * group: how many k share a scale: k itself (one scale a row), or a multiple of 16 that divides k; 32 of AP_Q4_K, 16 of
 * AP_Q6_K, whose k is a multiple of 256; of AP_INT3 a multiple of 32.
 * AP_W8A8: the bytes of an AP_INT8 pack with one scale a row, for activations in int8 (quantize_rows.h).
 * AP_TABLE: w = table[u] * scale, u of 4 bits, of NVFP4 times the row's factor. AP_Q4_K, AP_Q6_K: the formats of GGUF,
 * with their own bits. */
typedef struct {
    int32_t kind;
    int32_t half_scales; /* 1: the pack holds its scales (and minimums) as float16, exactly; AP_Q4_K and AP_Q6_K: 1;
                          * AP_TABLE, 2: as e4m3, and each row has a factor in float64 as well (NVFP4) */
    int32_t offset;      /* AP_INT4: w = (u - 8) * scale, u * scale + minimum or (u - zero point) * scale; AP_INT3: the
                            same with u - 4; others: 0 */
    float input_scale;   /* AP_W8A8: the static scale of its input; 0: each row of x has its own */
    int64_t n, k, group;
    const void* data;
    const float* bias;    /* [n] or NULL */
    const int32_t* order; /* [k] or NULL: column j of the weight multiplies x[order[j]]; NULL of AP_W8A8 */
    const float* table;   /* [16] of AP_TABLE */
    /* LoRA adapters, which decode steps alone add: y += (x @ down.T) @ up.T. down: [rank, k], for x in its own order;
     * up:
     * [(n + 15) / 16, rank, 16], zeros for rows beyond n; both of the type `factors`. rank 0: none. */
    int64_t rank;
    int32_t factors, reserved; /* AP_FLOAT32 or AP_BFLOAT16 */
    const void *down, *up;
} ap_linear;

/* Forms of weights that are read as a checkpoint stores them: the blocks of GGUF, and e4m3 with float32 scales. */
enum {
    AP_STORED_Q8_0 = 0,
    AP_STORED_Q4_0 = 1,
    AP_STORED_Q4_1 = 2,
    AP_STORED_Q5_0 = 3,
    AP_STORED_Q5_1 = 4,
    AP_STORED_Q2_K = 5,
    AP_STORED_Q3_K = 6,
    AP_STORED_Q5_K = 7,
    AP_STORED_IQ4_NL = 8,
    AP_STORED_IQ4_XS = 9,
    AP_STORED_Q4_K = 10,
    AP_STORED_Q6_K = 11,
    AP_STORED_E4M3 = 12
};
enum { AP_MAX_STORED = 64 }; /* tokens of a call */
typedef struct {
    int32_t form, reserved;
    int64_t n, k;
    int64_t scales; /* of a row of AP_STORED_E4M3: 1, or one for each 128 values */
    const uint8_t* data;
    const float* scale; /* [n, scales]; NULL of blocks */
    const float* bias;  /* [n] or NULL */
} ap_stored;

int ap_best_isa(void);
/* Chooses the path for every later call: an AP_ISA that this machine has, or -1 for its best. For tests. */
int ap_use_isa(int isa);
int ap_isa(void);

/* The OpenMP threads of the program, for all but decode steps: its GOMP_parallel, omp_get_thread_num and
 * omp_get_num_threads; NULLs for none. */
void ap_use_team(void* parallel, void* number, void* count);

/* Bytes of the pack that `shape` (data, bias, order and table are not read) needs; -1 where it is outside the limits.
 */
int64_t ap_pack_bytes(const ap_linear* shape);
/* q: int8 [n, k], or packed nibbles [n, k / 2] with the even k in the low nibble; scale, and offset where it is a
 * minimum: float32 [n, k / group]; zero points: uint8. AP_INT3: codes of 3 bits in rows of 3 k / 8 bytes, low bits
 * first. AP_Q4_K, AP_Q6_K: q is rows of blocks as in a file, scale NULL. NVFP4: offset is the factors of rows, float64
 * [n].
 */
int ap_pack(const ap_linear* shape, const void* q, const float* scale, const void* offset, void* pack);
int ap_unpack(const ap_linear* shape, const void* pack, void* q, float* scale, void* offset);

/* y = x @ w.T + bias. */
int ap_linear_run(
    const ap_linear* w, const void* x, int64_t m, int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads);
/* The same for many tokens, in float32: the weight, which is packed, is made float once for all of them. */
int ap_panels_run(
    const ap_linear* w, const float* x, int64_t m, int64_t x_stride, float* y, int64_t y_stride, int threads);
/* dx = dy @ w, the gradient of x, in float32; k in the pack's order of columns. dx_stride: a multiple of AP_COLUMNS
 * that holds k; what lies behind k in its rows is written too. */
int ap_gradient_run(
    const ap_linear* w, const float* dy, int64_t m, int64_t dy_stride, float* dx, int64_t dx_stride, int threads);
/* y = x @ w.T + bias of a weight as it is stored, for at most AP_MAX_STORED tokens, in float32. */
int ap_stored_run(
    const ap_stored* w, const float* x, int64_t m, int64_t x_stride, float* y, int64_t y_stride, int threads);
/* The values of all rows, float32 [n, k]. */
int ap_stored_values(const ap_stored* w, float* values, int threads);
/* rows[i] = w[ids[i]] as float32 [count, k]. */
int ap_gather(const ap_linear* w, const int64_t* ids, int64_t count, float* rows);
/* y = x / rms(x) * weight over the last dimension; where residual is given, x + residual first, kept in sum. float32.
 */
int ap_rmsnorm(const float* x, const float* residual, const float* weight, float eps, int64_t m, int64_t k, float* y,
    float* sum, int threads);
/* Rotates pairs (i, i + d / 2) of x[m, heads, d] in place by the angles whose cos and sin are [m, d / 2]. float32. */
int ap_rope_(float* x, const float* cos, const float* sin, int64_t m, int64_t heads, int64_t d);
/* y = activation(gate) * up, elementwise. float32. */
int ap_gated(const float* gate, const float* up, int activation, int64_t count, float* y, int threads);
int64_t ap_argmax(const float* x, int64_t count); /* first of the largest; a NaN counts as the largest */

/* keys, values[b][h][slot][d] lie at base + b * batch_stride + h * head_stride + slot * d. Token b attends to the slots
 * from starts[b] to slots[b], both included, and where window > 0 only to the last `window` of them. */
typedef struct {
    const float* q; /* [batch, heads, d] */
    const float* keys;
    const float* values;
    float* out; /* [batch, heads, d] */
    const int64_t* slots;
    const int64_t* starts;
    int64_t batch, heads, kv_heads, d, batch_stride, head_stride, window;
    float scale, softcap; /* softcap: 0 for none */
    const float* sinks;   /* [heads]: a score without a key, one more term of the softmax; or NULL */
} ap_attention;
int ap_attention_run(const ap_attention* a, int threads);

/* Keys and values of tokens in any order, as in pages: those of token i lie at i * kv_heads * d. Row b attends to the
 * tokens index[starts[b]] .. index[ends[b] - 1], at least one; tokens: that keys and values have room for. */
typedef struct {
    const float* q; /* [batch, heads, d] */
    const float* keys;
    const float* values;
    float* out; /* [batch, heads, d] */
    const int64_t* index;
    const int64_t* starts;
    const int64_t* ends;
    int64_t batch, heads, kv_heads, d, tokens;
    float scale, softcap; /* softcap: 0 for none */
    const float* sinks;   /* as of ap_attention */
} ap_pages;
int ap_pages_run(const ap_pages* a, int threads);

/* What a normalised vector is multiplied by (Gemma: 1 + w), and its epsilon; NULL: the norm is not there. layer: 1 of a
 * LayerNorm, which takes the mean off first, and adds `bias` where it is not NULL; 0 of an RMSNorm. */
typedef struct {
    const float* weight;
    const float* bias;
    float eps;
    int32_t layer;
} ap_norm;

/* A decoder layer. The sizes of its MLP and the numbers of its heads are those of its weights: heads = q.n / head_dim,
 * kv_heads = k.n / head_dim.
 * Where router.data is not NULL the MLP is one of router.n experts of one size: gate, up and down are the first one's,
 * gate and up of the next lie `expert_bytes` on and its down `down_bytes` on, their biases 2 gate.n and hidden floats.
 * A token takes the `chosen` experts with the largest of the router's logits, and sums them by the softmax of all
 * logits; normalise: divided by what the chosen ones add up to.
 * Where up.data is NULL the MLP is down(activation(gate(x))). Where cross_q.data is not NULL the layer attends, between
 * the attention to its own tokens and the MLP, to those of an encoder, whose keys and values of as many heads as
 * cross_q has are given. post: 1 where attention_norm, cross_norm and mlp_norm are of the sum of a part and its input,
 * 0 where they are of its input. */
typedef struct {
    ap_linear q, k, v, o, gate, up, down, cross_q, cross_o;
    ap_norm attention_norm, after_attention_norm, mlp_norm, after_mlp_norm, cross_norm; /* [hidden] */
    ap_norm q_norm, k_norm;                                                             /* [head_dim] */
    void *keys, *values;                      /* the layer's cache [max_batch, kv_heads, length, head_dim] */
    uint16_t *key_scales, *value_scales;      /* bfloat16 [max_batch, kv_heads, length], of formats in 8 bits */
    int64_t window;                           /* 0: attends to everything */
    float attention_scale, attention_softcap; /* softcap: 0 for none */
    int32_t rope, activation;                 /* rope: index of its rotary frequencies; -1: nothing is rotated */
    int32_t cache, normalise;                 /* cache: the format of keys and values */
    const float* sinks;                       /* [heads], as of ap_attention */
    ap_linear router;                         /* AP_DENSE */
    int64_t expert_bytes, down_bytes, chosen;
    float alpha, limit;                     /* of AP_CLAMPED */
    const float *cross_keys, *cross_values; /* [texts, heads, encoder's length, head_dim] */
    float cross_scale;
    int32_t post;
} ap_layer;

/* What an encoder gave. length: tokens of each of its `texts`; 0: there is none. text[max_batch]: the text of each row;
 * ends[texts]: how many of its tokens are attended to, at least one; mask[texts, length]: added to the scores, or NULL.
 */
typedef struct {
    int64_t texts, length;
    const int64_t *text, *ends;
    const float* mask;
} ap_encoded;

/* The vocabularies of the embedding and of the head are each its own weight's n. */
typedef struct {
    int64_t layers, hidden, head_dim, max_batch, length;
    const ap_layer* layer;
    ap_linear embedding, head;
    ap_norm final_norm;
    const float* inverse_frequency[2]; /* [head_dim / 2]; the second only where a layer asks for it */
    float rope_scaling[2];
    float embedding_scale, logits_softcap; /* softcap: 0 for none */
    int64_t one_sequence;                  /* 1: the tokens of a step are of one sequence, and the cache has one row */
    int64_t
        pages; /* 0, or the caches of all layers are AP_CACHE_PAGES with room for so many tokens; length: of a row */
    int64_t position_rows;  /* of positions[position_rows, hidden]: added to the embedding of a token at its position */
    const float* positions; /* or NULL */
    ap_norm embedding_norm; /* of that sum */
    int64_t biased_heads;   /* of score_bias[biased_heads, length]: added to the scores of the tokens' own attention, */
    const float* score_bias; /* the last of each head to that of the token itself, those before by distance; or NULL */
    ap_encoded encoded;
} ap_model;

/* A layer whose q.data is NULL is absent: no step may run it.
 * Copies the structs (not what they point to: that must outlive the step) and allocates all the memory that steps need.
 */
int ap_step_create(const ap_model* model, int max_threads, void** step);
void ap_step_free(void* step);
/* One token for each of `batch` sequences, or `batch` tokens of one, through layers first .. last - 1: writes its keys
 * and values at slots[b], attends to starts[b] .. slots[b], rotates by positions[b]; logits: float32 [batch, head.n],
 * or NULL where nobody reads them. hidden: float32 [batch, hidden], the residual stream: read where first > 0, written
 * where last is not the number of layers (logits are not, then); else NULL. Allocates nothing. */
int ap_step_run(void* step, int64_t batch, const int64_t* tokens, const int64_t* slots, const int64_t* starts,
    const int64_t* positions, int64_t first, int64_t last, float* hidden, float* logits, int threads);
/* A whole step over pages: slot i of the call is the token index[i] of the pages, and row b attends to the slots
 * starts[b] .. slots[b], the last of which is written; count: of index. Else as ap_step_run. */
int ap_step_run_pages(void* step, int64_t batch, const int64_t* tokens, const int64_t* slots, const int64_t* starts,
    const int64_t* positions, const int64_t* index, int64_t count, float* logits, int threads);

/* Asks the system for large pages; a hint, never an error. */
void ap_advise_large_pages(void* data, int64_t bytes);
/* Reads `bytes` once with `threads` threads; the best GB/s of `repeats`. What a step cannot beat. */
double ap_read_limit(const void* data, int64_t bytes, int repeats, int threads);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
