// One block of 16 rows of any kind of weight, times some tokens.
#pragma once
#include "dot_float.h"
#include "dot_limbs.h"
#include "dot_table.h"
#include "dot_w8a8.h"

namespace {

template <int M> void dot_some(const Weight& w, int64_t b, const Activations& a, int64_t token, float (*y)[16]) {
    const uint8_t* p = static_cast<const uint8_t*>(w.w.data) + b * w.l.block_bytes;
#if defined(__AVX512VNNI__)
#define AP_DOT dot_vnni
    if (w.w.kind == AP_INT3 && w.w.offset) return dot_vnni<M, AP_INT3, true>(w.w, w.l, p, a, token, y);
    if (w.w.kind == AP_INT4 && w.w.offset) return dot_vnni<M, AP_INT4, true>(w.w, w.l, p, a, token, y);
    if (w.w.kind == AP_TABLE) return dot_table<M>(w.w, w.l, p, a, token, y);
#elif defined(AP_DOTPROD)
#define AP_DOT dot_limbs
    if (w.w.kind == AP_INT3 && w.w.offset) return dot_limbs<M, AP_INT3, true>(w.w, w.l, p, a, token, y);
    if (w.w.kind == AP_INT4 && w.w.offset) return dot_limbs<M, AP_INT4, true>(w.w, w.l, p, a, token, y);
    if (w.w.kind == AP_TABLE) return dot_float<M, AP_TABLE>(w.w, w.l, p, a, token, y);
#else
#define AP_DOT dot_float
    if (w.w.kind == AP_TABLE) return dot_float<M, AP_TABLE>(w.w, w.l, p, a, token, y);
#endif
    switch (w.w.kind) {
        case AP_INT8: return AP_DOT<M, AP_INT8>(w.w, w.l, p, a, token, y);
        case AP_INT3: return AP_DOT<M, AP_INT3>(w.w, w.l, p, a, token, y);
        case AP_INT4: return AP_DOT<M, AP_INT4>(w.w, w.l, p, a, token, y);
        case AP_Q4_K: return AP_DOT<M, AP_Q4_K>(w.w, w.l, p, a, token, y);
        case AP_Q6_K: return AP_DOT<M, AP_Q6_K>(w.w, w.l, p, a, token, y);
    }
#undef AP_DOT
    const int64_t first = b * kBlockRows, rows = w.w.n - first < kBlockRows ? w.w.n - first : kBlockRows;
    dot_dense<M>(w.w, first, rows, a.x + token * a.x_stride, a.x_stride, y);
}

// NVFP4: the products of a block times the factors of its rows.
inline void times_factors(const Weight& w, int64_t b, int64_t count, float (*y)[16]) {
    const Factors factor = factors_of(w.l, static_cast<const uint8_t*>(w.w.data) + b * w.l.block_bytes);
    for (int64_t m = 0; m < count; m++)
        for (int row = 0; row < 16; row++) y[m][row] *= static_cast<float>(factor.of[row]);
}

// y[m][row] for tokens [token, token + count), count <= 8. How a token is summed does not depend on its neighbours.
inline void dot_block(const Weight& w, int64_t b, const Activations& a, int64_t token, int64_t count, float (*y)[16]) {
    if (w.w.kind == AP_W8A8) return w8a8_tokens<1>(w, b, a, token, count, y[0]);
    bool split = true;
    for (int64_t m = 0; m < count; m++) split &= a.split[token + m] != 0;
    if (!split && !reads_floats(w.w)) {
        const uint8_t* p = static_cast<const uint8_t*>(w.w.data) + b * w.l.block_bytes;
        for (int64_t m = 0; m < count; m++) {
            if (a.split[token + m]) dot_some<1>(w, b, a, token + m, y + m);
            else dot_exact(w.w, w.l, p, a.x + (token + m) * a.x_stride, kBlockRows, y[m]);
        }
        return;
    }
    int64_t m = 0;
    for (; m + 4 <= count; m += 4) dot_some<4>(w, b, a, token + m, y + m);
    if (count - m >= 2) dot_some<2>(w, b, a, token + m, y + m), m += 2;
    if (count - m >= 1) dot_some<1>(w, b, a, token + m, y + m);
    if (is_nvfp4(w.w)) times_factors(w, b, count, y);
}

// The bias of a block that is still to be added to its products; NULL for none.
inline const float* bias_after(const Weight& w, int64_t b) {
    return w.w.bias && w.w.kind != AP_W8A8 ? w.w.bias + b * kBlockRows : nullptr;
}

// The block's bias is added and its rows stored, float32.
inline void store_block(const Weight& w, int64_t b, int64_t count, float (*tile)[16], float* y, int64_t stride) {
    const int64_t rows = rows_in(w, b);
    const float* bias = bias_after(w, b);
    for (int64_t m = 0; m < count; m++) {
        if (bias)
            for (int64_t row = 0; row < rows; row++) tile[m][row] += bias[row];
        memcpy(y + m * stride + b * kBlockRows, tile[m], static_cast<size_t>(rows) * 4);
    }
}

// A row as float32, as torch dequantises it, in the order of x.
inline void gather_row(const Weight& w, int64_t row, float* out) {
    auto at = [&](int64_t k) { return w.w.order ? w.w.order[k] : k; };
    if (w.w.kind == AP_DENSE) {
        const float* from = static_cast<const float*>(w.w.data) + row * w.w.k;
        for (int64_t k = 0; k < w.w.k; k++) out[at(k)] = from[k];
        return;
    }
    const uint8_t* block = static_cast<const uint8_t*>(w.w.data) + row / kBlockRows * w.l.block_bytes;
    const int64_t r = row % kBlockRows;
    const double factor = is_nvfp4(w.w) ? factors_of(w.l, block).of[r] : 1;
    for (int64_t g = 0; g < w.l.groups; g++) {
        const Place p = place_of(w.l, block, g);
        const Group group = group_at(w.w, p);
        const auto scale = static_cast<float>(group.scale[r] * factor);
        for (int64_t k = 0; k < w.w.group; k++) {
            const int u = code_at(w.w.kind, p.codes, r, k);
            const float value = w.w.kind == AP_TABLE ? w.w.table[u] : static_cast<float>(u) - group.zero[r];
            out[at(g * w.w.group + k)] = value * scale + group.low[r];  // rounded twice, as torch does
        }
    }
}

}  // namespace
