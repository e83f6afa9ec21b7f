// LoRA adapters beside the weights of a decode step: y += (x @ down.T) @ up.T. The sums x @ down.T of all weights that
// read the same x are a stage of their own, the weights' ranks one after the other; the blocks of the products add
// theirs.
#pragma once
#include "linear.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kRanks = 4;  // that are an item of work

struct LowRank {
    float* sums;    // [batch, width]
    int64_t width;  // the most ranks of a stage
};

// Products of `count` tokens with some rows of a float32 matrix.
inline void dense_rows(const ap_linear& w, int64_t first, int64_t rows, const float* x, int64_t stride, int64_t count,
    float (*y)[16]) {
    int64_t m = 0;
    for (; m + 4 <= count; m += 4) dot_dense<4>(w, first, rows, x + m * stride, stride, y + m);
    if (count - m >= 2) dot_dense<2>(w, first, rows, x + m * stride, stride, y + m), m += 2;
    if (count - m >= 1) dot_dense<1>(w, first, rows, x + m * stride, stride, y + m);
}

// sums = x @ down.T of up to three weights. No stage where none of them has adapters.
inline void low_rank_stage(ThreadPool* pool, int self, const ap_linear* const* weights, int count, const float* x,
    int64_t stride, int64_t batch, const LowRank& low) {
    int64_t items = 0;
    for (int i = 0; i < count; i++) items += (weights[i]->rank + kRanks - 1) / kRanks;
    if (!items) return;
    WorkCursor work = {items};
    for (int64_t item; (item = pool_next(pool, self, &work)) >= 0;) {
        int64_t at = item * kRanks, before = 0;
        const ap_linear* const* w = weights;
        for (; at >= round_up((*w)->rank, kRanks); w++) at -= round_up((*w)->rank, kRanks), before += (*w)->rank;
        ap_linear down = {};
        down.kind = AP_DENSE, down.n = (*w)->rank, down.k = (*w)->k, down.data = (*w)->down;
        const int64_t rows = down.n - at < kRanks ? down.n - at : kRanks;
        float tile[kMaxBatch][16];
        dense_rows(down, at, rows, x, stride, batch, tile);
        for (int64_t m = 0; m < batch; m++)
            memcpy(low.sums + m * low.width + before + at, tile[m], static_cast<size_t>(rows) * 4);
    }
    pool_wait(pool, self);
}

// Adds the adapters' part of block b of a weight; sums: its first one, of the first token.
inline void add_low_rank(
    const ap_linear& w, int64_t b, const float* sums, int64_t width, int64_t count, float (*y)[16]) {
    if (!w.rank) return;
    const float* up = w.up + b * w.rank * kBlockRows;
    for (int64_t m = 0; m < count; m++, sums += width) {
        for (int64_t v = 0; v < kBlockRows; v += kLanes) {
            vf some[2] = {load(y[m] + v), vf{}};
            for (int64_t r = 0; r < w.rank; r++)
                some[r % 2] = fma(splat(sums[r]), load(up + r * kBlockRows + v), some[r % 2]);
            store(y[m] + v, some[0] + some[1]);
        }
    }
}

}  // namespace
