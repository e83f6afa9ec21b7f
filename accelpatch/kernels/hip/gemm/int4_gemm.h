// y[M, N] = gate(x[M, K] . w[N, K]^T + bias) for 9 to 64 tokens and int4 weights in tiles, in groups of a step (128
// values) or more.
//
// Weights are operand A of 16-bit float matrix instructions, 32 rows a warp, tokens operand B. A mask and an exclusive
// or convert a code to a float. The scale is applied once a step to float32 sums; so is the zero point or the minimum,
// times the sum of the step's activations, which a product with ones computes. Four warps share the activations of 128
// rows, two groups of four warps take alternate steps, and each block of a cluster has a part of K. Partial sums are
// reduced in a fixed order.
#pragma once
#include "arch/host.h"
#include "int4_gemm_output.h"
#include "int4_gemm_sums.h"

template <class T, int TOKENS>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT) int4_gemm_kernel(const GemvArgs a, const GemmPlan plan) {
    using Sums = GemmSums<T, TOKENS>;
    extern __shared__ __align__(128) char shared[];
    grid_release();
    const int rank = blockIdx.x % plan.cluster, place = blockIdx.x / plan.cluster, band = place % plan.bands,
              rows = place / plan.bands;
    GemmStream<TOKENS> stream(a, plan, shared, rank, rows, band);
    const auto sync = [&]() ALWAYS_INLINE { group_sync(stream.step_warp, GROUP_THREADS); };
    Sums total(a, stream.row_warp);
    stream.fill();
    char *stage = stream.stage_buffer, *const last = stage + (GEMM_STAGES<TOKENS> - 1) * STAGE_BYTES<TOKENS>,
         *before = last;
#pragma unroll 1
    for (int i = 0; i < stream.stages; ++i) {
        wait_copies<GEMM_STAGES<TOKENS> - 1>();
        sync();  // all copies of this stage have arrived, and all warps have read the one before
        stream.prefetch(before);
        if (i) total.add_rest(before);
        total.step(stage);
        before = stage, stage = stage == last ? stream.stage_buffer : stage + STAGE_BYTES<TOKENS>;
    }
    sync();
    if (stream.stages) total.add_rest(before);
    wait_copies<1>();  // also where K has fewer stages: their copies of zeros would overwrite the sums
    // Reduction: the sums of all groups of the cluster are written into the shared memory of the block that stores
    // them, over its multi-stage buffer, four sums of a lane together. The first barrier ends all reads of the buffer,
    // the second makes the sums visible.
    const auto all = [&]() ALWAYS_INLINE { plan.cluster > 1 ? cluster_sync() : __syncthreads(); };
    const int own_tiles = BLOCK_TILES / plan.cluster, sources = STEP_WARPS * plan.cluster;  // own_tiles: of this block
    Words4* box = reinterpret_cast<Words4*>(shared) + lane_id();
    all();
#pragma unroll
    for (int h = 0; h < WARP_TILES; ++h) {
        const int tile = stream.row_warp * WARP_TILES + h,
                  at = (rank * STEP_WARPS + stream.step_warp) * own_tiles + tile % own_tiles;
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            const float* v = total.y[h][j];
            Words4* into = box + (at * Sums::COLUMNS + total.column(j)) * WARP_SIZE;
            *(plan.cluster > 1 ? in_peer(into, tile / own_tiles) : into) = {
                float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]), float_to_bits(v[3])};
        }
    }
    all();
#pragma unroll 1
    for (int item = threadIdx.x / WARP_SIZE; item < own_tiles * Sums::COLUMNS; item += WARPS) {
        float v[4] = {};
        for (int source = 0; source < sources; ++source) {
            const Words4 one = box[(source * own_tiles * Sums::COLUMNS + item) * WARP_SIZE];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] += bits_to_float(word_of(one, i));
        }
        finish<T>(a, plan, rows * BLOCK_TILES + rank * own_tiles + item / Sums::COLUMNS,
            stream.token + item % Sums::COLUMNS * MATRIX_TOKENS, v);
    }
}

// Blocks that share K: as many as fit the GPU at once, two on an SM, with at least 8 steps each; two where a third of
// the blocks would otherwise wait for an SM.
inline int gemm_cluster(const GemvArgs& a, const GemmPlan& p, const DeviceLimits& limits, int64_t groups) {
    if (!limits.clusters) return 1;
    if (a.blocks == 1 || a.blocks == 2 || a.blocks == 4 || a.blocks == 8) return a.blocks;
    int cluster = 1;
    while (cluster < BLOCK_TILES && groups * cluster <= limits.sms && p.steps >= 16 * cluster) cluster *= 2;
    return cluster == 1 && 2 * groups <= 3 * limits.sms && p.steps >= 16 ? 2 : cluster;
}

template <class T, int TOKENS> int launch_gemm(const GemvArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    GemmPlan p = {};
    p.tiles = int32_t((a.n + 15) / 16), p.steps = int32_t((a.k + STEP_VALUES - 1) / STEP_VALUES);
    p.sets = ((p.steps - 1) >> a.group_shift) + 1, p.bands = int32_t((a.m + TOKENS - 1) / TOKENS);
    const int64_t groups = int64_t((p.tiles + BLOCK_TILES - 1) / BLOCK_TILES) * p.bands;
    p.cluster = gemm_cluster(a, p, limits, groups);
    const int blocks = int(groups * p.cluster), bytes = GEMM_BYTES<TOKENS>;
    if (bytes > limits.shared_block) return STATUS_MEMORY;
    const int error = launch_clusters(
        int4_gemm_kernel<T, TOKENS>, p.cluster, blocks, THREADS, bytes, stream, limits, a.dependent >= 0, a, p);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}
