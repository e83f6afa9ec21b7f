// The gradient of the input, dx[M, K] = dy[M, N] @ w[N, K]: rows of the weight are made float once and meet all tokens.
#pragma once
#include "panel.h"

namespace {

constexpr int64_t kGradientRows = 64;   // rows of the weight that are summed before the sum is added to dx
constexpr int64_t kGradientDepth = 64;  // k that are made float at once, which then stay in the first cache
static_assert(kGradientRows % kPanelRows == 0 && kPanelRows == 32 && kGradientDepth % kPanelRows == 0, "whole panels");

// out[4 rows][kLanes k] of in[kLanes k][4 rows]; lines of both lie kPanelRows apart.
AP_INLINE void transpose_rows(const float* in, float* out) {
#if AP_LANES == 4
    for (int row = 0; row < 4; row++)
        store(out + row * kPanelRows,
            vf{in[row], in[kPanelRows + row], in[2 * kPanelRows + row], in[3 * kPanelRows + row]});
#else
#if AP_LANES == 16
#define AP_OF(name) _mm512_##name
    auto fours = [](const float* p) {  // of the rows at k, k + 4, k + 8 and k + 12
        __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(p));
        v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 4 * kPanelRows), 1);
        v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 8 * kPanelRows), 2);
        return _mm512_insertf32x4(v, _mm_loadu_ps(p + 12 * kPanelRows), 3);
    };
#else
#define AP_OF(name) _mm256_##name
    auto fours = [](const float* p) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * kPanelRows), 1);
    };
#endif
    const auto a = fours(in), b = fours(in + kPanelRows), c = fours(in + 2 * kPanelRows),
               d = fours(in + 3 * kPanelRows);
    const auto ab = AP_OF(castps_pd)(AP_OF(unpacklo_ps)(a, b)), cd = AP_OF(castps_pd)(AP_OF(unpacklo_ps)(c, d));
    const auto ef = AP_OF(castps_pd)(AP_OF(unpackhi_ps)(a, b)), gh = AP_OF(castps_pd)(AP_OF(unpackhi_ps)(c, d));
    store(out, AP_OF(castpd_ps)(AP_OF(unpacklo_pd)(ab, cd)));
    store(out + kPanelRows, AP_OF(castpd_ps)(AP_OF(unpackhi_pd)(ab, cd)));
    store(out + 2 * kPanelRows, AP_OF(castpd_ps)(AP_OF(unpacklo_pd)(ef, gh)));
    store(out + 3 * kPanelRows, AP_OF(castpd_ps)(AP_OF(unpackhi_pd)(ef, gh)));
#undef AP_OF
#endif
}

// out[kPanelRows rows][kPanelRows k] of a panel[kPanelRows k][kPanelRows rows].
inline void transpose_panel(const float* panel, float* out) {
    for (int64_t row = 0; row < kPanelRows; row += 4)
        for (int64_t k = 0; k < kPanelRows; k += kLanes)
            transpose_rows(panel + k * kPanelRows + row, out + row * kPanelRows + k);
}

// Rows `row` to `row + kGradientRows` of w and k from `first` to `last`: out[(k - first) / 32][kGradientRows][32]. What
// lies behind the last k and the last row means nothing.
inline void gradient_panel(const Weight& w, int64_t row, int64_t first, int64_t last, float* out) {
    float panel[(kGradientDepth + 8) * kPanelRows] = {};
    for (int64_t part = 0; part < kGradientRows && row + part < w.w.n; part += kPanelRows)
        for (int64_t k = first; k < last; k += kGradientDepth) {
            panel_rows(w, (row + part) / kBlockRows, k, k + kGradientDepth < last ? k + kGradientDepth : last, panel);
            for (int64_t i = 0; i < kGradientDepth && k + i < last; i += kPanelRows)
                transpose_panel(panel + i * kPanelRows, out + (k + i - first) * kGradientRows + part * kPanelRows);
        }
}

// dx[M, columns] (+)= dy[M, rows] @ panel, of a panel as above.
template <int M>
void gradient_tokens(const float* panel, int64_t rows, int64_t columns, const float* dy, int64_t dy_stride, float* dx,
    int64_t dx_stride, bool more) {
    float near[M * kGradientRows];  // rows of dy may lie so far apart that they drive each other out of the cache
    for (int64_t m = 0; m < M; m++) memcpy(near + m * kGradientRows, dy + m * dy_stride, static_cast<size_t>(rows) * 4);
    for (int64_t k = 0; k < columns; k += kPanelRows)
        panel_tokens<M>(panel + k * kGradientRows, rows, near, kGradientRows, dx + k, dx_stride, more);
}

// Columns `first` to `last` of dx, whose rows have room for whole panels.
inline void gradient_columns(const Weight& w, int64_t first, int64_t last, const GradientCall& c, float* panel) {
    for (int64_t row = 0; row < w.w.n; row += kGradientRows) {
        const int64_t rows = w.w.n - row < kGradientRows ? w.w.n - row : kGradientRows;
        gradient_panel(w, row, first, last, panel);
        int64_t t = 0;
        auto some = [&](auto tokens) {
            for (; t + tokens <= c.m; t += tokens)
                gradient_tokens<tokens>(panel, rows, last - first, c.dy + t * c.dy_stride + row, c.dy_stride,
                    c.dx + t * c.dx_stride + first, c.dx_stride, row > 0);
        };
        some(std::integral_constant<int, kPanelTokens>());
        some(std::integral_constant<int, 4>());
        some(std::integral_constant<int, 1>());
    }
}

// Floats of a thread for `columns` of the weight.
inline int64_t gradient_floats(int64_t columns) { return kGradientRows * columns; }

}  // namespace
