// The epilogue of int4_gemm.h: sums that are not finite are recomputed by a plain loop, then bias and gate.
#pragma once
#include "int4_gemm_stream.h"

// One output by a plain loop, for a token with values that are not finite, or too large for sums over codes.
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

// Finishes and stores a lane's four sums of a tile, for the tokens from `first` on. With a gate a tile has 8 rows of
// gate and the 8 rows of up that belong to them. Precondition: all lanes of the warp call it.
template <class T> DEVICE void finish(const GemvArgs& a, const GemmPlan& plan, int tile, int first, float* sums) {
    const bool gate = a.activation == ACT_SILU_GATE;
    const int n = int(a.n), columns = gate ? n / 2 : n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = matrix_row(matrix_row_index(i)),
                  row = gate ? tile * 8 + (r & 7) + (r >> 3) * columns : tile * 16 + r;
        if (tile * 16 + r >= n || first + matrix_token(i) >= int(a.m)) continue;
        if (!(fabsf(sums[i]) < INFINITY)) sums[i] = by_values<T>(a, plan, tile, r, first + matrix_token(i));
        if (a.bias) sums[i] += T::up(load_activation2(static_cast<const uint16_t*>(a.bias) + row));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = matrix_row(matrix_row_index(i)), column = gate ? tile * 8 + r : tile * 16 + r,
                  token = first + matrix_token(i);
        const float up = matrix_below(sums, i);
        if ((gate && r >= 8) || column >= columns || token >= int(a.m)) continue;
        static_cast<uint16_t*>(a.y)[token * a.y_stride + column] =
            static_cast<uint16_t>(T::down(gate ? silu(sums[i]) * up : sums[i]));
    }
}
