// A warp's sums of codes times activations, for int4_gemm.h: codes are multiplied as floats, and scales and offsets are
// applied to the sums.
#pragma once
#include "int4_gemm_stream.h"

// By how much the float of a code u exceeds u: bf16 has 128 + u. The sums of 1024 + u in fp16 would be too inaccurate,
// so that 1032 is subtracted from each.
template <class T> constexpr float CODE_BASE = T::BF16 ? 128.f : -8.f;
// The floats of nibbles i and i + 4 of a word, which are values 2 i and 2 i + 1.
template <class T> DEVICE uint32_t code_pair(uint32_t word, int i) {
    if constexpr (T::BF16) return masked_xor(word >> 4 * i, 0x000f000fu, 0x43084308u);
    else return pair_fma(masked_xor(word >> 4 * i, 0x000f000fu, 0x64086408u), 0x3c003c00u, 0xe408e408u);
}
template <class T> constexpr uint32_t PAIR_OF_ONES = T::BF16 ? 0x3f803f80u : 0x3c003c00u;
// What must be added to the float of a code times its scale, for each weight of a group.
DEVICE float rest_of(int kind, float base, float scale, float offset) {
    const float subtracted = kind == OFFSET_MINIMUM ? base : base + (kind == OFFSET_NONE ? 8.f : offset);
    return fmaf(-subtracted, scale, kind == OFFSET_MINIMUM ? offset : 0.f);
}

// A warp's sums of 32 rows by all of a block's tokens. It starts with its own column of tokens, whose sums of
// activations it computes for all warps of the group.
template <class T, int TOKENS> struct GemmSums {
    static constexpr int COLUMNS = TOKENS / MATRIX_TOKENS;
    const GemvArgs& a;
    const int row_warp;
    // rest: what must be added for each weight of the last step, not yet multiplied by the step's sums of activations.
    float y[WARP_TILES][COLUMNS][4] = {}, rest[WARP_TILES][MATRIX_ROWS];

    DEVICE GemmSums(const GemvArgs& a, int row_warp) : a(a), row_warp(row_warp) {}
    DEVICE int column(int j) const { return (j + row_warp) % COLUMNS; }
    // Multiplies one stage, and stores the sums of this warp's column of activations in it. Precondition: all copies of
    // the stage have arrived, for all warps of the group. A barrier must come before add_rest().
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
                if (matrix_row_index(i) == 0) sums_of(stage, row_warp)[matrix_token(i)] = ones[i];
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
                    y[h][j][i] = fmaf(scale[h][matrix_row_index(i)], part[h][j][i], y[h][j][i]);
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
    // Adds `rest` times the sums of activations of the last step. Precondition: a barrier of the group since step().
    DEVICE void add_rest(char* stage) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = sums_of(stage, column(j))[matrix_token(i)];
#pragma unroll
                for (int h = 0; h < WARP_TILES; ++h) y[h][j][i] = fmaf(rest[h][matrix_row_index(i)], sum, y[h][j][i]);
            }
    }
};
