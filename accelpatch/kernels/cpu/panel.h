// Products of many tokens: a panel of 32 rows of the weight is made float once, as torch dequantises it, and meets all
// tokens.
#pragma once
#include <type_traits>

#include "linear.h"

namespace {

constexpr int64_t kPanelRows = 32, kPanelDepth = 512;  // rows and k of a panel: 64 KiB, which stay in a core's cache
constexpr int64_t kPanelChain = 128;  // k that are summed before they are added: less is lost than in one long sum
constexpr int kPanelVectors = 2;      // of rows in registers at a time
constexpr int kPanelTokens = AP_LANES == 16 ? 12 : 4;  // as many sums as there are registers for

static_assert(
    kPanelRows % (kPanelVectors * kLanes) == 0 && kPanelRows == 2 * kBlockRows, "whole vectors of two blocks");

template <int KIND>
constexpr int kDepth = KIND == AP_INT8   ? 4
                       : KIND == AP_Q6_K ? 16
                       : KIND == AP_INT3 ? 32
                                         : 8;  // k of the words read at once

// The codes of kLanes rows and kDepth k, whose words lie at q; of tables with more bits above them.
template <int KIND> AP_INLINE void panel_codes(const uint8_t* q, vi* codes) {
    vi words, upper = {};
    if constexpr (KIND == AP_INT3) {
        memcpy(&upper, q + 2 * kBlockRows * 4, sizeof upper);
        for (int i = 0; i < 8; i++) {
            memcpy(&words, q + i / 4 * kBlockRows * 4, sizeof words);
            for (int j = 0; j < 4; j++)
                codes[4 * i + j] = (words >> (8 * j + i % 4 * 2) & 3) | (upper >> (8 * j + i) & 1) << 2;
        }
        return;
    }
    for (int i = 0; i < (kDepth<KIND> + 7) / 8; i++) {
        memcpy(&words, q + i * kBlockRows * 4, sizeof words);
        if (KIND == AP_Q6_K) memcpy(&upper, q + 2 * kBlockRows * 4, sizeof upper);
        for (int j = 0; j < 4; j++) {
            vi* to = codes + 8 * i + j;
            if (KIND == AP_INT8) to[0] = words >> (8 * j) & 255;
            else if (KIND == AP_TABLE) to[0] = words >> (8 * j), to[4] = words >> (8 * j + 4);
            else to[0] = words >> (8 * j) & 15, to[4] = words >> (8 * j + 4) & 15;
            if (KIND != AP_Q6_K) continue;
            to[0] |= (upper >> (8 * j + 4 * i) & 3) << 4;
            to[4] |= (upper >> (8 * j + 4 * i + 2) & 3) << 4;
        }
    }
}

// k from `first` to `last` of block b as columns of the panel: out[last - first][kPanelRows], of which it writes 16.
template <int KIND, bool LOW> void panel_block(const Weight& w, int64_t b, int64_t first, int64_t last, float* out) {
    const uint8_t* block = static_cast<const uint8_t*>(w.w.data) + b * w.l.block_bytes;
    const Table table = KIND == AP_TABLE ? table_of(w.w) : Table{};
    const Factors factors = KIND == AP_TABLE && is_nvfp4(w.w) ? factors_of(w.l, block) : Factors{};
    for (int64_t k = first; k < last;) {
        const int64_t g = k / w.w.group, end = (g + 1) * w.w.group < last ? (g + 1) * w.w.group : last;
        const Place p = place_of(w.l, block, g);
        vf scale[kBlockVectors], zero[kBlockVectors], low[kBlockVectors];
        for (int64_t v = 0; v < kBlockVectors; v++) {
            scale[v] = group_scale<KIND>(w.w, p.header, p.at, v);
            zero[v] = group_zero<KIND>(w.w, p.header, v);
            low[v] = group_low<KIND>(w.w, p.header, p.at, v);
            if (KIND != AP_TABLE || !is_nvfp4(w.w)) continue;
            for (int64_t i = 0; i < kLanes; i++)
                scale[v][i] = static_cast<float>(scale[v][i] * factors.of[v * kLanes + i]);
        }
        for (; k < end; k += kDepth<KIND>) {
            const uint8_t* q = p.codes + (k - g * w.w.group) * kRowsBytes<KIND>;
            float* to = out + (k - first) * kPanelRows;
            for (int64_t v = 0; v < kBlockVectors; v++) {
                vi codes[kDepth<KIND>];
                panel_codes<KIND>(q + v * kLanes * 4, codes);
                for (int j = 0; j < kDepth<KIND>; j++) {
                    vf made;
                    if constexpr (KIND == AP_TABLE) made = look_up(table, codes[j]);
                    else made = __builtin_convertvector(codes[j], vf) - zero[v];
                    made *= scale[v];
                    if (LOW) made += low[v];  // rounded twice, as torch does
                    store(to + j * kPanelRows + v * kLanes, made);
                }
            }
        }
        k = end;  // the last words of a group may reach beyond it
    }
}

// The rows of a panel, for any k: zeros where there are none.
inline void panel_rows(const Weight& w, int64_t b, int64_t first, int64_t last, float* out) {
    for (int64_t half = 0; half < 2; half++, b++) {
        float* to = out + half * kBlockRows;
        if (b >= w.l.blocks) {
            for (int64_t k = 0; k < last - first; k++) memset(to + k * kPanelRows, 0, kBlockRows * 4);
            continue;
        }
        switch (w.w.kind) {
            case AP_INT8: panel_block<AP_INT8, false>(w, b, first, last, to); break;
            case AP_INT3:
                if (w.w.offset == AP_MINIMUM) panel_block<AP_INT3, true>(w, b, first, last, to);
                else panel_block<AP_INT3, false>(w, b, first, last, to);
                break;
            case AP_TABLE: panel_block<AP_TABLE, false>(w, b, first, last, to); break;
            case AP_Q4_K: panel_block<AP_Q4_K, true>(w, b, first, last, to); break;
            case AP_Q6_K: panel_block<AP_Q6_K, false>(w, b, first, last, to); break;
            default:
                if (w.w.offset == AP_MINIMUM) panel_block<AP_INT4, true>(w, b, first, last, to);
                else panel_block<AP_INT4, false>(w, b, first, last, to);
        }
    }
}

// y[M, 32] (+)= x[M, depth] @ panel[depth, 32] for M tokens.
template <int M>
void panel_tokens(
    const float* panel, int64_t depth, const float* x, int64_t x_stride, float* y, int64_t y_stride, bool more) {
    for (int64_t column = 0; column < kPanelRows; column += kPanelVectors * kLanes) {
        vf sum[M][kPanelVectors];
        for (int m = 0; m < M; m++)
            for (int v = 0; v < kPanelVectors; v++) sum[m][v] = splat(0.0f);
        const float* p = panel + column;
        for (int64_t k = 0; k < depth; k++, p += kPanelRows) {
            vf w[kPanelVectors];
            for (int v = 0; v < kPanelVectors; v++) w[v] = load(p + v * kLanes);
            for (int m = 0; m < M; m++) {
                const vf one = splat(x[m * x_stride + k]);
                for (int v = 0; v < kPanelVectors; v++) sum[m][v] = fma(w[v], one, sum[m][v]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < kPanelVectors; v++) {
                float* to = y + m * y_stride + column + v * kLanes;
                store(to, more ? load(to) + sum[m][v] : sum[m][v]);
            }
    }
}

// Room for a panel, whose last words may reach beyond its depth, and for the products of m tokens with it.
inline int64_t panel_floats(int64_t m) { return (kPanelDepth + 8 + m) * kPanelRows; }

// tile[m, 32] for all tokens: the products of a panel's 32 rows, from block b on.
inline void panel_product(
    const Weight& w, int64_t b, const float* x, int64_t m, int64_t x_stride, float* panel, float* tile) {
    for (int64_t first = 0; first < w.w.k; first += kPanelDepth) {
        const int64_t last = first + kPanelDepth < w.w.k ? first + kPanelDepth : w.w.k, depth = last - first;
        panel_rows(w, b, first, last, panel);
        for (int64_t k = 0; k < depth; k += kPanelChain) {
            const float *part = panel + k * kPanelRows, *from = x + first + k;
            const int64_t count = depth - k < kPanelChain ? depth - k : kPanelChain;
            const bool more = first + k > 0;
            int64_t t = 0;
            auto some = [&](auto tokens) {
                for (; t + tokens <= m; t += tokens)
                    panel_tokens<tokens>(
                        part, count, from + t * x_stride, x_stride, tile + t * kPanelRows, kPanelRows, more);
            };
            some(std::integral_constant<int, kPanelTokens>());
            some(std::integral_constant<int, 4>());
            some(std::integral_constant<int, 1>());
        }
    }
}

// Those of the rows that there are, with their bias, into y[m, n].
inline void store_panel(const Weight& w, int64_t b, const float* tile, int64_t m, float* y, int64_t y_stride) {
    const int64_t first = b * kBlockRows, left = w.w.n - first, rows = left < kPanelRows ? left : kPanelRows;
    for (int64_t t = 0; t < m; t++) {
        float* to = y + t * y_stride + first;
        const float* from = tile + t * kPanelRows;
        if (rows == kPanelRows) memcpy(to, from, kPanelRows * 4);  // of a size that the compiler knows: no call
        else memcpy(to, from, static_cast<size_t>(rows) * 4);
        for (int64_t row = 0; row < rows && w.w.bias; row++) to[row] += w.w.bias[first + row];
    }
}

}  // namespace
