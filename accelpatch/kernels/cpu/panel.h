// Products of many tokens: a panel of 32 rows of the weight is made float once, as torch dequantises it, and meets all
// tokens.
#pragma once
#include "linear.h"

namespace {

constexpr int64_t kPanelRows = 32, kPanelDepth = 512;  // rows and k of a panel: 64 KiB, which stay in a core's cache
constexpr int kPanelVectors = 2;                       // of rows in registers at a time
constexpr int kPanelTokens = AP_LANES == 16 ? 12 : 4;  // as many sums as there are registers for
constexpr int64_t kBlockVectors = kBlockRows / kLanes;

static_assert(
    kPanelRows % (kPanelVectors * kLanes) == 0 && kPanelRows == 2 * kBlockRows, "whole vectors of two blocks");

// Four k of kLanes rows, whose bytes lie as 32-bit words at q, times the rows' scales, plus their minimums:
// out[4][kPanelRows].
template <int KIND, bool LOW> AP_INLINE void panel_words(const uint8_t* q, int shift, vf scale, vf low, float* out) {
    vi words;
    memcpy(&words, q, sizeof words);
    for (int j = 0; j < 4; j++) {
        vi value = (words >> (8 * j + shift)) & (KIND == AP_INT8 ? 255 : 15);
        if (KIND == AP_INT8 || !LOW) value -= KIND == AP_INT8 ? 128 : 8;
        vf made = __builtin_convertvector(value, vf) * scale;
        if (LOW) made += low;  // rounded twice, as torch does
        store(out + j * kPanelRows, made);
    }
}

// k from `first` to `last` of block b as columns of the panel: out[last - first][kPanelRows], of which it writes 16.
template <int KIND, bool LOW> void panel_block(const Weight& w, int64_t b, int64_t first, int64_t last, float* out) {
    const uint8_t* block = static_cast<const uint8_t*>(w.w.data) + b * w.l.block_bytes;
    constexpr int64_t step = KIND == AP_INT8 ? 4 : 8;
    for (int64_t k = first; k < last;) {
        const int64_t g = k / w.w.group, end = (g + 1) * w.w.group < last ? (g + 1) * w.w.group : last;
        const uint8_t* p = block + g * w.l.group_bytes;
        float scale[16], low[16] = {};
        load_scales(p, w.w.half_scales, scale);
        if (LOW) load_scales(p + w.l.part, w.w.half_scales, low);
        for (; k < end; k += step) {
            const uint8_t* q = p + w.l.header + (k - g * w.w.group) * kBlockRows / (KIND == AP_INT8 ? 1 : 2);
            float* to = out + (k - first) * kPanelRows;
            for (int64_t v = 0; v < kBlockVectors; v++) {
                const vf factor = load(scale + v * kLanes), beside = load(low + v * kLanes);
                panel_words<KIND, LOW>(q + v * kLanes * 4, 0, factor, beside, to + v * kLanes);
                if (KIND == AP_INT4)
                    panel_words<KIND, LOW>(q + v * kLanes * 4, 4, factor, beside, to + 4 * kPanelRows + v * kLanes);
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
        } else if (w.w.kind == AP_INT8) {
            panel_block<AP_INT8, false>(w, b, first, last, to);
        } else if (w.w.minimum) {
            panel_block<AP_INT4, true>(w, b, first, last, to);
        } else {
            panel_block<AP_INT4, false>(w, b, first, last, to);
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
            for (int v = 0; v < kPanelVectors; v++)
                sum[m][v] = more ? load(y + m * y_stride + column + v * kLanes) : splat(0.0f);
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
            for (int v = 0; v < kPanelVectors; v++) store(y + m * y_stride + column + v * kLanes, sum[m][v]);
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
        int64_t t = 0;
        for (; t + kPanelTokens <= m; t += kPanelTokens)
            panel_tokens<kPanelTokens>(
                panel, depth, x + t * x_stride + first, x_stride, tile + t * kPanelRows, kPanelRows, first > 0);
        for (; t + 4 <= m; t += 4)
            panel_tokens<4>(
                panel, depth, x + t * x_stride + first, x_stride, tile + t * kPanelRows, kPanelRows, first > 0);
        for (; t < m; t++)
            panel_tokens<1>(
                panel, depth, x + t * x_stride + first, x_stride, tile + t * kPanelRows, kPanelRows, first > 0);
    }
}

// Those of the rows that there are, with their bias, into y[m, n].
inline void store_panel(const Weight& w, int64_t b, const float* tile, int64_t m, float* y, int64_t y_stride) {
    const int64_t first = b * kBlockRows, left = w.w.n - first, rows = left < kPanelRows ? left : kPanelRows;
    for (int64_t t = 0; t < m; t++) {
        float* to = y + t * y_stride + first;
        memcpy(to, tile + t * kPanelRows, static_cast<size_t>(rows) * 4);
        for (int64_t row = 0; row < rows && w.w.bias; row++) to[row] += w.w.bias[first + row];
    }
}

}  // namespace
