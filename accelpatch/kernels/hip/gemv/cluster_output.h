// A lane's four sums of a tile on their way to y, where a cluster's warps send theirs to the one that adds up.
#pragma once
#include "gemv_output.h"

// What a lane needs to finish its four sums, rows r and r + 8 of two tokens each; as bits, which nothing waits for yet.
// A residual comes, and y goes, as pairs of columns of a token.
template <class F, class T> struct ClusterOutput {
    const GemvArgs& a;
    const bool pairs_aligned;  // pairs are aligned, and none is half outside
    float scale[2] = {1.f, 1.f};
    uint32_t bias[2] = {0, 0}, residual[2] = {0, 0};
    // A lane's pairs of y: the first column, of token lane / 4, and where the tile's columns end.
    struct Pairs {
        int column, columns;
        DEVICE Pairs(const GemvArgs& a, int tile) {
            const bool gate = a.activation == ACT_SILU_GATE;
            column = tile * (gate ? 8 : 16) + 2 * (lane_id() & 3),
            columns = gate ? min(int(a.n / 2), tile * 8 + 8) : int(a.n);
            if ((lane_id() >> 2) >= int(a.m)) columns = 0;
        }
        DEVICE bool there(int h, int of_pair) const { return column + 8 * h + of_pair < columns; }
    };
    DEVICE ClusterOutput(const GemvArgs& a, const GemvPlan& plan) : a(a), pairs_aligned(plan.y_pairs) {}
    // Asks for what a tile needs.
    DEVICE void begin(int tile) {
        const bool gate = a.activation == ACT_SILU_GATE;
        const int rows = int(gate ? a.n / 2 : a.n);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row =
                min(tile * (gate ? 8 : 16) + (lane_id() >> 2) + (gate ? 0 : 8 * h), rows - 1) + (gate ? h * rows : 0);
            if constexpr (ROW_FACTORS<F>) scale[h] = F::factor(a, tile * 16 + (lane_id() >> 2) + 8 * h);
            else if (F::GROUPS == 0 && !STAGE_SCALES<F> && a.scale) scale[h] = static_cast<const float*>(a.scale)[row];
            if (a.bias) bias[h] = Output<F, T>::bits(a.bias, row);
        }
        if (!a.residual) return;
        const Pairs pairs(a, tile);
        const uint16_t* from =
            static_cast<const uint16_t*>(a.residual) + (lane_id() >> 2) * a.residual_stride + pairs.column;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (pairs.there(h, 0) && pairs_aligned) residual[h] = load_activation4(from + 8 * h);
            else if (pairs.there(h, 0))
                residual[h] = load_activation2(from + 8 * h) |
                              (pairs.there(h, 1) ? load_activation2(from + 8 * h + 1) << 16 : 0u);
        }
    }
    // token_scales: of quantised tokens.
    template <class V> DEVICE void store(int tile, const V* sum, const float* token_scales) const {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (QUANTIZES_ROWS<F>)
                v[i] = fmaf(token_scales[Cells<false>::token(i)] * scale[i / 2], float(sum[i]), T::up(bias[i / 2]));
            else v[i] = sum[i] * scale[i / 2] + T::up(bias[i / 2]);
        }
        if (a.activation == ACT_SILU_GATE) {
#pragma unroll
            for (int i = 0; i < 2; ++i) v[i] = silu(v[i]) * v[i + 2];
        }
        const Pairs pairs(a, tile);
        uint16_t* to = static_cast<uint16_t*>(a.y) + (lane_id() >> 2) * a.y_stride + pairs.column;
        uint32_t pair[2];  // by all lanes, before any of them stores
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t more = transposed(residual[h]);
            pair[h] = transposed(T::down_pair(v[2 * h] + T::up(more & 0xffffu), v[2 * h + 1] + T::up_high(more)));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!pairs.there(h, 0)) continue;
            if (pairs_aligned) {
                *reinterpret_cast<uint32_t*>(to + 8 * h) = pair[h];
            } else {
                to[8 * h] = static_cast<uint16_t>(pair[h]);
                if (pairs.there(h, 1)) to[8 * h + 1] = static_cast<uint16_t>(pair[h] >> 16);
            }
        }
    }
};
