// Loads int4 weights and activations into a multi-stage buffer, for int4_gemm.h.
#pragma once
#include "gemv/formats.h"
#include "arch/mma.h"

constexpr int ROW_WARPS = 4, STEP_WARPS = WARPS / ROW_WARPS, GROUP_THREADS = ROW_WARPS * WARP_SIZE;
constexpr int WARP_TILES = 2, BLOCK_TILES = WARP_TILES * ROW_WARPS;
constexpr int STEP_VALUES = 128, TILE_STEP = 1024;  // bytes of a tile and step
// In a warp's part of a stage: where its scales and offsets begin, after its weights; and the bytes of all three.
constexpr int TABLES_AT = WARP_TILES * TILE_STEP, WARP_BYTES = TABLES_AT + WARP_TILES * 2 * 32;
constexpr int X_ROW = STEP_VALUES * 2;

struct GemmPlan {
    int32_t tiles, steps, sets, bands, cluster;  // sets: of scales; bands: of tokens; cluster: blocks that share K
};

// The layout of a stage, which each group of warps has for itself: its warps' weights, activations, their sums.
constexpr int X_AT = ROW_WARPS * WARP_BYTES;
template <int TOKENS> constexpr int SUMS_AT = X_AT + TOKENS * X_ROW;
template <int TOKENS> constexpr int STAGE_BYTES = SUMS_AT<TOKENS> + TOKENS * 4;
template <int TOKENS> constexpr int GEMM_STAGES = SHARED_STAGES ? (TOKENS > 16 ? 3 : 4) : 2;
template <int TOKENS> constexpr int GEMM_BYTES = STEP_WARPS * GEMM_STAGES<TOKENS> * STAGE_BYTES<TOKENS>;

// A warp's part of the work, and its copies into the multi-stage buffer.
template <int TOKENS> struct GemmStream {
    static constexpr int DEPTH = GEMM_STAGES<TOKENS>, PASS = GROUP_THREADS / 16;  // tokens that a group copies at once
    const GemvArgs& a;
    const GemmPlan& plan;
    const int row_warp, step_warp, token;  // token: the block's first
    const int end;                         // end of the block's steps
    int step, stages, hop;      // step: of the stage that is prefetched next; hop: bytes to the warp's second tile
    char* stage_buffer;         // the group's
    const char *w, *table, *x;  // a lane's addresses at that step

    DEVICE GemmStream(const GemvArgs& a, const GemmPlan& plan, char* shared, int rank, int rows, int band)
        : a(a),
          plan(plan),
          row_warp(threadIdx.x / WARP_SIZE % ROW_WARPS),
          step_warp(threadIdx.x / GROUP_THREADS),
          token(band * TOKENS),
          end((rank + 1) * plan.steps / plan.cluster) {
        const int begin = rank * plan.steps / plan.cluster, lane = lane_id(), thread = threadIdx.x % GROUP_THREADS;
        // Where there is no tile, the last one is computed again, and not stored.
        const int tile = min(rows * BLOCK_TILES + row_warp * WARP_TILES, plan.tiles - 1),
                  more = tile + 1 < plan.tiles ? 1 : 0;
        step = begin + step_warp, stages = (end - begin + STEP_WARPS - 1) / STEP_WARPS;
        stage_buffer = shared + step_warp * DEPTH * STAGE_BYTES<TOKENS>;
        hop = more * plan.steps * TILE_STEP;
        w = static_cast<const char*>(a.w) + (int64_t(tile) * plan.steps + step) * TILE_STEP +
            (4 * fragment_row(0) + fragment_quarter()) * 16;
        table = static_cast<const char*>(lane & 8 && a.offset ? a.offset : a.scale) +
                (int64_t(tile + (lane >> 4 & more)) * plan.sets * 8 + (lane & 7)) * 4;
        x = static_cast<const char*>(a.x) +
            ((token + thread / 16) * a.x_stride + step * STEP_VALUES + thread % 16 * 8) * 2;
    }
    // Starts the copies of the stage that is `ahead` further: of the weights that the lane itself reads, and of a word
    // of scales or offsets, which all lanes of the warp read.
    DEVICE void copy_weights(char* stage, int ahead) const {
        const int lane = lane_id(), at = step + ahead * STEP_WARPS;
        char* into = stage + row_warp * WARP_BYTES + lane * 16;
        const char* from = w + ahead * (STEP_WARPS * TILE_STEP);
#pragma unroll
        for (int h = 0; h < WARP_TILES; ++h)
#pragma unroll
            for (int i = 0; i < ROWS_PER_LANE; ++i)
                stream_copy<16>(into + h * TILE_STEP + i * (WARP_SIZE * 16), from + h * hop + i * 512, at < end);
        if (lane < 32) stream_copy<4>(into + TABLES_AT - lane * 12, table + (at >> a.group_shift) * 32, at < end);
    }
    // Starts the copies of activations, in chunks of eight values. For odd tokens the halves of a row are exchanged, so
    // that what is read at once is in different banks.
    DEVICE void copy_x(char* stage, int ahead) const {
        const int thread = threadIdx.x % GROUP_THREADS, own = thread / 16, c = thread % 16,
                  at = step + ahead * STEP_WARPS;
        char* into = stage + X_AT + own * X_ROW + (c ^ (own & 1) << 2) * 16;
        const bool inside = at < end && at * STEP_VALUES + c * 8 < int(a.k);
#pragma unroll
        for (int t = 0; t < TOKENS; t += PASS)
            copy_activation16(into + t * X_ROW, x + ahead * (STEP_WARPS * X_ROW) + t * a.x_stride * 2,
                inside && token + own + t < int(a.m));
    }
    DEVICE void advance(int by) {
        step += by * STEP_WARPS, w += by * (STEP_WARPS * TILE_STEP), x += by * (STEP_WARPS * X_ROW);
    }
    // Prefetches the first stages: weights while the kernel before still runs, activations after it has ended.
    DEVICE void fill() {
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) copy_weights(stage_buffer + i * STAGE_BYTES<TOKENS>, i);
        grid_wait();
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) copy_x(stage_buffer + i * STAGE_BYTES<TOKENS>, i), commit_copies();
        advance(DEPTH - 1);
    }
    // Prefetches the next stage into `stage`. Precondition: all warps of the group have read what is there.
    DEVICE void prefetch(char* stage) {
        if (step - step_warp < end) copy_weights(stage, 0), copy_x(stage, 0);
        commit_copies();
        advance(1);
    }
};
