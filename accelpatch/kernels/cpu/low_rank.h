// LoRA adapters in a decode step: y += (x @ down.T) @ up.T. The products x @ down.T of all weights that read the same x
// are a stage of their own, the ranks of one weight after those of another. The blocks of each linear layer then add
// their rows of up.
#pragma once
#include "linear.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kRanks = 4;  // ranks of one work item, which share each load of x

struct LowRank {
    float* sums;    // [batch, width]
    int64_t width;  // the most ranks of a stage
};

AP_INLINE vf load_factor(const float* p) { return load(p); }
AP_INLINE vf load_factor(const uint16_t* p) {
    typedef uint16_t vh __attribute__((vector_size(AP_LANES * 2)));
    vh h;
    memcpy(&h, p, sizeof h);
    return as_float(__builtin_convertvector(h, vi) << 16);
}

template <class T> AP_INLINE vf part_of_factor(const T* p, int64_t count) {
    T some[kLanes] = {};
    memcpy(some, p, static_cast<size_t>(count) * sizeof(T));
    return load_factor(some);
}

// sums[m][r] of M tokens and `rows` ranks, of which `down` is the first row.
template <int M, class T>
void low_rank_sums(const T* down, int64_t rows, int64_t k, const float* x, int64_t stride, float* sums, int64_t width) {
    const T* row[kRanks];
    for (int64_t r = 0; r < kRanks; r++) row[r] = down + (r < rows ? r : 0) * k;
    vf dot[kRanks][M] = {};
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
        vf of_x[M];
        for (int m = 0; m < M; m++) of_x[m] = load(x + m * stride + i);
        for (int r = 0; r < kRanks; r++) {
            const vf w = load_factor(row[r] + i);
            __builtin_prefetch(row[r] + i + kRanks * k);  // of the next item, or of `up`, which follows
            for (int m = 0; m < M; m++) dot[r][m] = fma(w, of_x[m], dot[r][m]);
        }
    }
    for (int r = 0; r < kRanks && i < k; r++)
        for (int m = 0; m < M; m++)
            dot[r][m] = fma(part_of_factor(row[r] + i, k - i), load_part(x + m * stride + i, k - i), dot[r][m]);
    for (int64_t r = 0; r < rows; r++)
        for (int m = 0; m < M; m++) sums[m * width + r] = sum(dot[r][m]);
}

template <class T>
void low_rank_item(
    const ap_linear& w, int64_t first, const float* x, int64_t stride, int64_t batch, float* sums, int64_t width) {
    const int64_t rows = w.rank - first < kRanks ? w.rank - first : kRanks;
    const T* down = static_cast<const T*>(w.down) + first * w.k;
    int64_t m = 0;
    for (; m + 4 <= batch; m += 4) low_rank_sums<4>(down, rows, w.k, x + m * stride, stride, sums + m * width, width);
    for (; m + 2 <= batch; m += 2) low_rank_sums<2>(down, rows, w.k, x + m * stride, stride, sums + m * width, width);
    if (m < batch) low_rank_sums<1>(down, rows, w.k, x + m * stride, stride, sums + m * width, width);
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
        float* sums = low.sums + before + at;
        if ((*w)->factors == AP_BFLOAT16) low_rank_item<uint16_t>(**w, at, x, stride, batch, sums, low.width);
        else low_rank_item<float>(**w, at, x, stride, batch, sums, low.width);
    }
    pool_wait(pool, self);
}

template <class T>
void add_block(const T* up, int64_t rank, const float* sums, int64_t width, int64_t count, float (*y)[16]) {
    constexpr int64_t line = 64 / sizeof(T), ahead = 4;  // blocks
    for (int64_t i = 0; i < rank * kBlockRows; i += line) __builtin_prefetch(up + ahead * rank * kBlockRows + i);
    for (int64_t m = 0; m < count; m++, sums += width) {
        for (int64_t v = 0; v < kBlockRows; v += kLanes) {
            vf some[4] = {load(y[m] + v), vf{}, vf{}, vf{}};
            int64_t r = 0;
            for (; r + 4 <= rank; r += 4)
                for (int i = 0; i < 4; i++)
                    some[i] = fma(splat(sums[r + i]), load_factor(up + (r + i) * kBlockRows + v), some[i]);
            for (; r < rank; r++) some[0] = fma(splat(sums[r]), load_factor(up + r * kBlockRows + v), some[0]);
            store(y[m] + v, (some[0] + some[1]) + (some[2] + some[3]));
        }
    }
}

// Adds the adapters' part of block b of a weight; sums: its first one, of the first token.
inline void add_low_rank(
    const ap_linear& w, int64_t b, const float* sums, int64_t width, int64_t count, float (*y)[16]) {
    if (!w.rank) return;
    const int64_t at = b * w.rank * kBlockRows;
    if (w.factors == AP_BFLOAT16) add_block(static_cast<const uint16_t*>(w.up) + at, w.rank, sums, width, count, y);
    else add_block(static_cast<const float*>(w.up) + at, w.rank, sums, width, count, y);
}

}  // namespace
