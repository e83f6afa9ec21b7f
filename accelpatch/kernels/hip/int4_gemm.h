// y[M, N] = gate(x[M, K] . w[N, K]^T + bias) for 9 to 64 tokens and int4 weights in tiles, in groups of a step (128
// values) or more.
//
// Weights are the first operand of 16-bit float products, 32 rows a warp, tokens the second. A code becomes a float by
// a mask and an exclusive or; scale, and zero point or minimum, are applied once a step to float32 sums, the latter
// times the sum of the step's activations, which is a product with ones. Four warps share 128 rows' activations, two
// groups of four take steps in order, and the blocks of a cluster a part of K each; sums are added up in a fixed order.
#pragma once
#include "formats.h"
#include "host.h"
#include "mma.h"

constexpr int ROW_WARPS = 4, STEP_WARPS = WARPS / ROW_WARPS, GROUP_THREADS = ROW_WARPS * WARP_SIZE;
constexpr int WARP_TILES = 2, BLOCK_TILES = WARP_TILES * ROW_WARPS;
constexpr int STEP_VALUES = 128, TILE_STEP = 1024;  // bytes of a tile and step
constexpr int TABLES_AT = WARP_TILES * TILE_STEP,
              WARP_BYTES = TABLES_AT + WARP_TILES * 2 * 32;  // a warp's weights, scales, offsets
constexpr int X_ROW = STEP_VALUES * 2;

struct GemmPlan {
    int32_t tiles, steps, sets, bands, cluster;  // sets: of scales; bands: of tokens; cluster: blocks that share K
};

// A stage of a multi-stage buffer: of each group its warps' weights, its activations, their sums.
constexpr int X_AT = ROW_WARPS * WARP_BYTES;
template <int TOKENS> constexpr int SUMS_AT = X_AT + TOKENS * X_ROW;
template <int TOKENS> constexpr int STAGE_BYTES = SUMS_AT<TOKENS> + TOKENS * 4;
template <int TOKENS> constexpr int GEMM_STAGES = SHARED_STAGES ? (TOKENS > 16 ? 3 : 4) : 2;
template <int TOKENS> constexpr int GEMM_BYTES = STEP_WARPS * GEMM_STAGES<TOKENS> * STAGE_BYTES<TOKENS>;

// What a code u is as a 16-bit float, less u: bf16 holds 128 + u; fp16 would lose too much by 1024, which is taken off.
template <class T> constexpr float CODE_BASE = T::BF16 ? 128.f : -8.f;
// Nibbles i and i + 4 of a word, values 2 i and 2 i + 1.
template <class T> DEVICE uint32_t code_pair(uint32_t word, int i) {
    if constexpr (T::BF16) return masked_xor(word >> 4 * i, 0x000f000fu, 0x43084308u);
    else return pair_fma(masked_xor(word >> 4 * i, 0x000f000fu, 0x64086408u), 0x3c003c00u, 0xe408e408u);
}
template <class T> constexpr uint32_t PAIR_OF_ONES = T::BF16 ? 0x3f803f80u : 0x3c003c00u;
// What is added to a code's value times its scale.
DEVICE float rest_of(int kind, float base, float scale, float offset) {
    const float subtracted = kind == OFFSET_MINIMUM ? base : base + (kind == OFFSET_NONE ? 8.f : offset);
    return fmaf(-subtracted, scale, kind == OFFSET_MINIMUM ? offset : 0.f);
}

// A warp's place in the work, and its way from memory into the multi-stage buffer.
template <int TOKENS> struct GemmStream {
    static constexpr int DEPTH = GEMM_STAGES<TOKENS>, PASS = GROUP_THREADS / 16;  // tokens that a group copies at once
    const GemvArgs& a;
    const GemmPlan& plan;
    const int row_warp, step_warp, token;  // token: the block's first
    const int end;                         // of the block's steps
    int step, stages, hop;      // step: of the next stage that is asked for; hop: bytes to the warp's second tile
    char* stage_buffer;         // the group's
    const char *w, *table, *x;  // of a lane, at that step

    DEVICE GemmStream(const GemvArgs& a, const GemmPlan& plan, char* shared, int rank, int rows, int band)
        : a(a),
          plan(plan),
          row_warp(threadIdx.x / WARP_SIZE % ROW_WARPS),
          step_warp(threadIdx.x / GROUP_THREADS),
          token(band * TOKENS),
          end((rank + 1) * plan.steps / plan.cluster) {
        const int begin = rank * plan.steps / plan.cluster, lane = lane_id(), thread = threadIdx.x % GROUP_THREADS;
        // A tile that is not there is the last one again; what comes of it is not stored.
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
    // Of the stage so many further: each lane what it reads itself, and a word of scales or offsets.
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
    // Chunks of eight values; of odd tokens the halves of a row change places, so that banks differ for what is read at
    // once.
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
    // The first stages: weights before the kernel before has ended, activations behind.
    DEVICE void fill() {
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) copy_weights(stage_buffer + i * STAGE_BYTES<TOKENS>, i);
        grid_wait();
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) copy_x(stage_buffer + i * STAGE_BYTES<TOKENS>, i), commit_copies();
        advance(DEPTH - 1);
    }
    DEVICE void prefetch(char* stage) {
        if (step - step_warp < end) copy_weights(stage, 0), copy_x(stage, 0);
        commit_copies();
        advance(1);
    }
};

// A warp's sums of 32 rows by all of a block's tokens. Its columns of tokens are counted from its own one, of which it
// makes the sums of activations for all warps of the group.
template <class T, int TOKENS> struct GemmSums {
    static constexpr int COLUMNS = TOKENS / MATRIX_TOKENS;
    const GemvArgs& a;
    const int row_warp;
    float y[WARP_TILES][COLUMNS][4] = {},
          rest[WARP_TILES][MATRIX_ROWS];  // rest: of the step before, times its activations' sums

    DEVICE GemmSums(const GemvArgs& a, int row_warp) : a(a), row_warp(row_warp) {}
    DEVICE int column(int j) const { return (j + row_warp) % COLUMNS; }
    // One stage; leaves the sums of this warp's column of activations.
    DEVICE void step(char* stage) {
        const char *weights = stage + row_warp * WARP_BYTES, *tables = weights + TABLES_AT;
        float part[WARP_TILES][COLUMNS][4] = {}, ones[4] = {};
        Words4 codes[WARP_TILES][ROWS_PER_LANE];
#pragma unroll
        for (int h = 0; h < WARP_TILES; ++h)
#pragma unroll
            for (int i = 0; i < ROWS_PER_LANE; ++i)
                codes[h][i] =
                    *reinterpret_cast<const Words4*>(weights + h * TILE_STEP + (i * WARP_SIZE + lane_id()) * 16);
        uint32_t one[ROWS_PER_LANE][4];
        for (auto& row : one)
            for (uint32_t& v : row) v = PAIR_OF_ONES<T>;
        const char* from =
            stage + X_AT + matrix_column() * X_ROW + (fragment_quarter() ^ (matrix_column() & 1) << 2) * 16;
        const int other = matrix_column() & 1 ? -64 : 64;  // from an even chunk of four to the odd one
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            uint32_t v[WARP_TILES][ROWS_PER_LANE][4];
#pragma unroll
            for (int h = 0; h < WARP_TILES; ++h)
#pragma unroll
                for (int i = 0; i < ROWS_PER_LANE; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) v[h][i][e] = code_pair<T>(word_of(codes[h][i], p), e);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const Words4 b = *reinterpret_cast<const Words4*>(
                    from + column(j) * (MATRIX_TOKENS * X_ROW) + p / 2 * 128 + p % 2 * other);
#pragma unroll
                for (int h = 0; h < WARP_TILES; ++h) multiply_eight<T>(part[h][j], v[h], b);
                if (j == 0) multiply_eight<T>(ones, one, b);
            }
        }
        if (row_warp < COLUMNS && matrix_row(0) == 0)
            for (int i = 0; i < 4; ++i)
                if (matrix_which(i) == 0) sums_of(stage, row_warp)[matrix_token(i)] = ones[i];
        float scale[WARP_TILES][MATRIX_ROWS], offset[WARP_TILES][MATRIX_ROWS];
        if (a.scale_is_bf16) read_tables<true>(scale, offset, tables);
        else read_tables<false>(scale, offset, tables);
#pragma unroll
        for (int h = 0; h < WARP_TILES; ++h) {
#pragma unroll
            for (int r = 0; r < MATRIX_ROWS; ++r)
                rest[h][r] = rest_of(a.offset_kind, CODE_BASE<T>, scale[h][r], offset[h][r]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    y[h][j][i] = fmaf(scale[h][matrix_which(i)], part[h][j][i], y[h][j][i]);
        }
    }
    template <bool BF16_SCALES>
    static DEVICE void read_tables(
        float (&scale)[WARP_TILES][MATRIX_ROWS], float (&offset)[WARP_TILES][MATRIX_ROWS], const char* tables) {
#pragma unroll
        for (int h = 0; h < WARP_TILES; ++h)
#pragma unroll
            for (int r = 0; r < MATRIX_ROWS; ++r) {
                const uint32_t* pair = reinterpret_cast<const uint32_t*>(tables) + h * 16 + (matrix_row(r) & 7);
                scale[h][r] = table_value(pair[0], matrix_row(r) >> 3, BF16_SCALES);
                offset[h][r] = table_value(pair[8], matrix_row(r) >> 3, BF16_SCALES);
            }
    }
    static DEVICE float* sums_of(char* stage, int column) {
        return reinterpret_cast<float*>(stage + SUMS_AT<TOKENS>) + column * MATRIX_TOKENS;
    }
    // What the step before left to do, once its sums of activations are all there.
    DEVICE void add_rest(char* stage) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = sums_of(stage, column(j))[matrix_token(i)];
#pragma unroll
                for (int h = 0; h < WARP_TILES; ++h) y[h][j][i] = fmaf(rest[h][matrix_which(i)], sum, y[h][j][i]);
            }
    }
};

// One output by a plain loop, for a token with values that are not finite, or too large for sums of codes.
template <class T> DEVICE float by_values(const GemvArgs& a, const GemmPlan& plan, int tile, int row, int token) {
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + token * a.x_stride;
    const char* codes = static_cast<const char*>(a.w) + int64_t(tile) * plan.steps * TILE_STEP + row * 64;
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < int(a.k); ++k) {
        const int64_t at = (int64_t(tile) * plan.sets + (k / STEP_VALUES >> a.group_shift)) * 8 + row % 8;
        const float scale = table_value(static_cast<const uint32_t*>(a.scale)[at], row / 8, a.scale_is_bf16);
        const float offset =
            a.offset ? table_value(static_cast<const uint32_t*>(a.offset)[at], row / 8, a.scale_is_bf16) : 0.f;
        const float value = a.offset_kind == OFFSET_MINIMUM ? Int4<1, OFFSET_MINIMUM>::value(codes, k, scale, offset)
                            : a.offset_kind == OFFSET_ZERO_POINT
                                ? Int4<1, OFFSET_ZERO_POINT>::value(codes, k, scale, offset)
                                : Int4<1, OFFSET_NONE>::value(codes, k, scale, offset);
        sum = fmaf(value, T::up(load_activation2(x + k)), sum);
    }
    return sum;
}

// A lane's four sums of a tile and its tokens from `first` on, into y. Under a gate a tile has 8 gates and their 8 ups.
template <class T> DEVICE void finish(const GemvArgs& a, const GemmPlan& plan, int tile, int first, float* sums) {
    const bool gate = a.activation == ACT_SILU_GATE;
    const int n = int(a.n), columns = gate ? n / 2 : n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = matrix_row(matrix_which(i)), row = gate ? tile * 8 + (r & 7) + (r >> 3) * columns : tile * 16 + r;
        if (tile * 16 + r >= n || first + matrix_token(i) >= int(a.m)) continue;
        if (!(fabsf(sums[i]) < INFINITY)) sums[i] = by_values<T>(a, plan, tile, r, first + matrix_token(i));
        if (a.bias) sums[i] += T::up(load_activation2(static_cast<const uint16_t*>(a.bias) + row));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = matrix_row(matrix_which(i)), column = gate ? tile * 8 + r : tile * 16 + r,
                  token = first + matrix_token(i);
        const float up = matrix_below(sums, i);
        if ((gate && r >= 8) || column >= columns || token >= int(a.m)) continue;
        static_cast<uint16_t*>(a.y)[token * a.y_stride + column] =
            static_cast<uint16_t>(T::down(gate ? silu(sums[i]) * up : sums[i]));
    }
}

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
    // Over the multi-stage buffer, in the block that stores them: the sums of all groups of the cluster, a lane's four
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
