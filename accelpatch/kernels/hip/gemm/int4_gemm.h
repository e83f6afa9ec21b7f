// y[M, N] = gate(x[M, K] . w[N, K]^T + bias) for 9 to 64 tokens and int4 weights in tiles, in groups of a step (128
// values) or more.
//
// Weights are the first operand of 16-bit float products, 32 rows a warp, tokens the second. A code becomes a float by
// a mask and an exclusive or; scale, and zero point or minimum, are applied once a step to float32 sums, the latter
// times the sum of the step's activations, which is a product with ones. Four warps share 128 rows' activations, two
// groups of four take steps alternately, and the blocks of a cluster a part of K each; sums are added up in a fixed
// order.
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
        sync();  // all copies of this stage are there, and all warps have left the one before
        stream.prefetch(before);
        if (i) total.add_rest(before);
        total.step(stage);
        before = stage, stage = stage == last ? stream.stage_buffer : stage + STAGE_BYTES<TOKENS>;
    }
    sync();
    if (stream.stages) total.add_rest(before);
    wait_copies<1>();  // also for stages that a short K has not, whose zeros would come over the sums
    // The sums of all groups of the cluster go over the multi-stage buffer of the block that stores them, a lane's four
    // cells together.
    const auto all = [&]() ALWAYS_INLINE { plan.cluster > 1 ? cluster_sync() : __syncthreads(); };
    const int held = BLOCK_TILES / plan.cluster, sources = STEP_WARPS * plan.cluster;  // held: tiles
    Words4* box = reinterpret_cast<Words4*>(shared) + lane_id();
    all();
#pragma unroll
    for (int h = 0; h < WARP_TILES; ++h) {
        const int tile = stream.row_warp * WARP_TILES + h,
                  at = (rank * STEP_WARPS + stream.step_warp) * held + tile % held;
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            const float* v = total.y[h][j];
            Words4* into = box + (at * Sums::COLUMNS + total.column(j)) * WARP_SIZE;
            *(plan.cluster > 1 ? beside(into, tile / held) : into) = {
                float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]), float_to_bits(v[3])};
        }
    }
    all();
#pragma unroll 1
    for (int item = threadIdx.x / WARP_SIZE; item < held * Sums::COLUMNS; item += WARPS) {
        float v[4] = {};
        for (int source = 0; source < sources; ++source) {
            const Words4 one = box[(source * held * Sums::COLUMNS + item) * WARP_SIZE];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] += bits_to_float(word_of(one, i));
        }
        finish<T>(a, plan, rows * BLOCK_TILES + rank * held + item / Sums::COLUMNS,
            stream.token + item % Sums::COLUMNS * MATRIX_TOKENS, v);
    }
}

// Blocks that share K: as many as find room at once, two on an SM, with 8 steps each; two where a third has to wait.
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
