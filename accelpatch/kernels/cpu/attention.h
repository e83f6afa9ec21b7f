// Decode attention of the query heads that share a key head, over a run of at most 64 slots at a time, and how runs are
// joined. The runs are counted from the first slot attended to: neither padding, nor neighbours, nor threads change a
// result.
#pragma once
#include "layout.h"
#include "pointwise.h"

namespace {

constexpr int64_t kRun = 64;
constexpr int64_t kMaxGroup = 64;  // query heads a key head

AP_INLINE int64_t first_slot(int64_t slot, int64_t start, int64_t window) {
    return window > 0 && slot - window + 1 > start ? slot - window + 1 : start;
}
AP_INLINE int64_t runs(int64_t first, int64_t slot) { return (slot - first + kRun) / kRun; }

// score[i] = scale * q . key[i]
inline void scores(const float* q, const float* keys, int64_t d, int64_t count, float scale, float* score) {
    for (int64_t i = 0; i < count; i += 4) {
        const int64_t some = count - i < 4 ? count - i : 4;
        vsum dot[4] = {};
        int64_t k = 0;
        if (some == 4) {
            for (; k + kLanes <= d; k += kLanes) {
                const vf v = load(q + k);
                for (int j = 0; j < 4; j++) dot[j] = add_product(v, load(keys + (i + j) * d + k), dot[j]);
            }
        }
        for (; k < d; k += kLanes) {
            const int64_t left = d - k < kLanes ? d - k : kLanes;
            const vf v = load_part(q + k, left);
            for (int j = 0; j < some; j++) dot[j] = add_product(v, load_part(keys + (i + j) * d + k, left), dot[j]);
        }
        for (int j = 0; j < some; j++) score[i + j] = sum(dot[j]) * scale;
    }
}

// score becomes e^(score - most); returns their sum. Lanes beyond count must be -Inf before and are zero after.
inline float exponentials(float* score, float most) {
    vf total = {};
    for (int64_t i = 0; i < kRun; i += kLanes) {
        const vf e = exp(load(score + i) - most);
        store(score + i, e);
        total += e;
    }
    return sum(total);
}

// out = sum of weight[i] * value[i]; even and odd slots apart, so that no sum waits for the one before
inline void weighted_sum(const float* weight, const float* values, int64_t d, int64_t count, float* out) {
    int64_t k = 0;
    for (; k + 4 * kLanes <= d; k += 4 * kLanes) {
        vf even[4] = {}, odd[4] = {};
        int64_t i = 0;
        for (; i + 2 <= count; i += 2) {
            const float* row = values + i * d + k;
            for (int j = 0; j < 4; j++) {
                even[j] = fma(splat(weight[i]), load(row + j * kLanes), even[j]);
                odd[j] = fma(splat(weight[i + 1]), load(row + d + j * kLanes), odd[j]);
            }
        }
        for (int j = 0; j < 4 && i < count; j++)
            even[j] = fma(splat(weight[i]), load(values + i * d + k + j * kLanes), even[j]);
        for (int j = 0; j < 4; j++) store(out + k + j * kLanes, even[j] + odd[j]);
    }
    for (; k < d; k += kLanes) {
        const int64_t left = d - k < kLanes ? d - k : kLanes;
        vf total = {};
        for (int64_t i = 0; i < count; i++) total = fma(splat(weight[i]), load_part(values + i * d + k, left), total);
        store_part(out + k, total, left);
    }
}

// A run's result for one query head: its largest score, the sum of its exponentials, its weighted values (not yet
// divided).
AP_INLINE int64_t run_floats(int64_t d) { return round_up(d + 2, 16); }

// q: `group` heads of d. partial: the run's place for the first head; further heads `stride` floats on. bias: added to
// the first head's scores, that of further heads `bias_stride` floats on; NULL for none.
inline void attend_run(const float* q, int64_t group, const float* keys, const float* values, int64_t d, int64_t count,
    float scale, float cap, float* partial, int64_t stride, const float* bias = nullptr, int64_t bias_stride = 0) {
    for (int64_t h = 0; h < group; h++, partial += stride) {
        float score[kRun];
        scores(q + h * d, keys, d, count, scale, score);
        float most = -INFINITY;
        if (cap > 0)
            for (int64_t i = 0; i < count; i++) score[i] = softcap(score[i], cap);
        if (bias)
            for (int64_t i = 0; i < count; i++) score[i] += bias[h * bias_stride + i];
        for (int64_t i = 0; i < count; i++) most = score[i] > most ? score[i] : most;
        for (int64_t i = count; i < kRun; i++) score[i] = -INFINITY;
        partial[0] = most;
        partial[1] = exponentials(score, most);
        weighted_sum(score, values, d, count, partial + 2);
    }
}

AP_INLINE const float* sink_of(const float* sinks, int64_t head) { return sinks ? sinks + head : nullptr; }

// Joins a head's `count` runs. sink: a score without a key, which takes its part of the softmax; NULL for none.
inline void join_runs(const float* partial, int64_t count, int64_t d, const float* sink, float* out) {
    float most = -INFINITY, total = 0;
    for (int64_t c = 0; c < count; c++) most = partial[c * run_floats(d)] > most ? partial[c * run_floats(d)] : most;
    if (sink && *sink > most) most = *sink;
    if (sink) total = exp(splat(*sink - most))[0];
    for (int64_t k = 0; k < d; k++) out[k] = 0;
    for (int64_t c = 0; c < count; c++) {
        const float* p = partial + c * run_floats(d);
        const float weight = exp(splat(p[0] - most))[0];
        total += weight * p[1];
        for (int64_t k = 0; k < d; k++) out[k] += weight * p[2 + k];
    }
    for (int64_t k = 0; k < d; k++) out[k] /= total;
}

}  // namespace
