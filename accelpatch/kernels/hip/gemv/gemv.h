// y[M, N] = epilogue(norm(x[M, K]) . w[N, K]^T): the arguments of a launch. M <= 8 a launch of the kernel; the host
// loops.
#pragma once
#include <cstdint>

enum Norm : int32_t { NORM_NONE = 0, NORM_RMS = 1, NORM_RMS_PLUS_ONE = 2, NORM_LAYER = 3 };
enum Activation : int32_t {
    ACT_NONE = 0,
    ACT_SILU_GATE = 1,
    ACT_RELU = 2,
    ACT_GELU = 3,
    ACT_GELU_TANH = 4,
    ACT_SILU = 5
};
// From OFFSET_NF4 on codes are those of a codebook: of nf4 and fp4 the scale's table has the high halves of float32
// scales, the offset's their low halves; e2m1 has one table, of bf16 scales; nvfp4 one of pairs of e4m3, and as offset
// factors of rows, double[tiles][16].
enum Offset : int32_t {
    OFFSET_NONE = 0,
    OFFSET_ZERO_POINT = 1,
    OFFSET_MINIMUM = 2,
    OFFSET_NF4 = 3,
    OFFSET_FP4 = 4,
    OFFSET_E2M1 = 5,
    OFFSET_NVFP4 = 6
};
// Whether a format has a second table, in addition to that of scales.
constexpr bool two_tables(int32_t kind) { return kind != OFFSET_NONE && kind != OFFSET_E2M1 && kind != OFFSET_NVFP4; }

// Pointers and sizes only, so that ctypes can fill it. Sizes and strides in elements. With ACT_SILU_GATE the first half
// of w's rows are gates, the second half ups, and y has N / 2 columns (tiled formats: interleave the rows).
struct GemvArgs {
    const void* w;
    const void* scale;  // float[N]; fp8 in blocks: float[N][ceil(K / 128)]; grouped formats: 16-bit, packed in tiles;
                        // compact: float[tiles][16]
    // As the packed scale, or null; nvfp4: factors of rows; compact: outliers, see gemv_output.h; w8a8: float, the
    // static scale of x, or null.
    const void* offset;
    const void* x;
    const void* norm_weight;  // [K] or null for ones
    const void* norm_bias;    // [K], NORM_LAYER
    const void* bias;         // [N] or null
    const void* residual;     // [M, columns of y] or null
    void* y;
    // Null, or two counters of a producer-consumer flag, zero before and after. The producer counts in `producer` how
    // many of y's first producer_columns are finished; the next kernel has the same counters as `consumer`, and starts
    // on these columns without waiting for the rest. Preconditions: both kernels have it or neither; of a single token
    // these columns are SENTINEL, all bits set, before the producer starts; the same counters are not used again before
    // another kernel has waited for the consumer's end.
    int32_t *producer, *consumer;
    int64_t producer_columns, consumer_columns;  // of y, whole tiles; of x
    int64_t m, n, k;
    int64_t x_stride, residual_stride, y_stride;
    float epsilon;
    int32_t norm, activation, offset_kind, scale_is_bf16;
    int32_t group_shift;  // log2 of the steps that share one packed scale; compact: outliers of a row, in fours
    // Tuning; zero means the default. None of it changes a result's bits. dependent: -1 waits for the kernel before.
    int32_t blocks, shallow, dependent;
#if defined(LOW_RANK)
    // LoRA adapters, see low_rank.h. down: [ranks][K]; up: [N][rank], both in x's dtype, rank a multiple of 8. low: two
    // buffers, float[ranks][8 pieces][8], and a counter after them. Before the first launch all bits of the buffers are
    // set and the counter is zero; each launch leaves them ready for the next. Rows of w from second_part and from
    // third_part on have the second and third `rank` of the `ranks`.
    const void *down, *up;
    float* low;
    int32_t rank, ranks, second_part, third_part;
#endif
};

// A launch over experts, see stacked.h: a token's experts are one after the other in its tiles (gate and up) or in its
// steps (down).
struct ExpertPlan {
    const void *ids, *weights;        // [tokens][chosen]
    const void* logits;               // [tokens][experts], from which they are chosen, or null
    int32_t chosen, experts;          // of a token; in the stack
    int32_t ids_are_64, weight_type;  // weight_type: of weights or logits: 0 float, 1 bf16, 2 fp16
    int32_t down, normalise, narrow;
    int32_t lanes_shift;         // log2 of the lanes that compute the rank of a logit
    int32_t blocks;              // of a token
    int32_t tiles, steps, sets;  // of an expert; sets of scales of a tile
    uint32_t tile_inverse, step_inverse;
    int32_t routing_at, scores_at;  // bytes
};

// How the work is partitioned, and the layout of shared memory. The host computes it from N, K and the device; only the
// sizes that depend on the number of tokens use M.
struct GemvPlan {
    int32_t tiles, steps, k_tiles, k_tile_steps, staged_k_tiles;  // staged_k_tiles: K tiles staged at once
    int32_t signalled_k_tiles;      // of this launch's K tiles, those whose activations the product before signals
    int32_t signalled;              // tiles whose columns are signalled
    int32_t warps_shift;            // log2 of the warps that share a tile's K
    int32_t part_steps;             // of a block's part of K, in a cluster
    int32_t rounds_at_once;         // rounds of tiles that share each staged K tile: 2 where a cluster has several
    int32_t tile_hop, row_hop;      // from a warp's tile to its next
    int64_t weight_hop, scale_hop;  // in bytes
    int32_t partial_buffers;
    int32_t token_stride;  // bytes
    // block_exponents_at: of quantised tokens, their scales, see quantized_stage.h
    int32_t block_exponents_at, sums_at, moments_at, partial_at, parked_at, mbarriers_at, stages_at, bytes;  // bytes
    int32_t w_aligned, x_aligned;
    int32_t y_pairs;  // columns of y, and of a residual, come in aligned pairs
    ExpertPlan experts;
#if defined(LOW_RANK)
    int32_t low_at;  // bytes
#endif
};
// Code that only the variants with LoRA adapters inside have, see low_rank.h.
#if defined(LOW_RANK)
#define ADAPTERS(...) __VA_ARGS__
#else
#define ADAPTERS(...)
#endif
