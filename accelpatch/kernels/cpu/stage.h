// What the stages of a decode step share: a thread's view of the step, products of one input, norms and sums of rows.
#pragma once
#include "attention.h"
#include "kernels.h"
#include "low_rank.h"
#include "step.h"

namespace {

struct Worker {
    const StepCall* call;
    Step* step;
    const ap_model* model;
    Scratch* own;
    ThreadPool* pool;
    int self;
    int64_t batch;
};

// Makes `input` (rows of k) ready for the products with `w`.
inline Activations ready(
    const Worker& t, void* memory, const float* input, int64_t k, int64_t stride, const ap_linear& w) {
    Activations a = activations_in(memory, t.batch, k);
    describe(a, input, stride, w);
    prepare(a, 0, t.batch);
    return a;
}

inline LowRank low_rank_of(const Worker& t) { return {t.step->low, t.step->largest.ranks}; }

// Products of the same input with up to three weights; each may read another form of it.
inline void linears(const Worker& t, const ap_linear* const* weights, float* const* outputs, int count,
    const float* input, int64_t k, int64_t input_stride, int64_t output_stride) {
    Weight w[3] = {};
    int64_t ends[3] = {}, items = 0, ranks = 0;
    const float* sums[3] = {};
    const LowRank low = low_rank_of(t);
    for (int i = 0; i < count; i++) {
        w[i] = weight_of(*weights[i]);
        ends[i] = items += w[i].l.blocks;
        sums[i] = low.sums + ranks;
        ranks += w[i].w.rank;
    }
    low_rank_stage(t.pool, t.self, weights, count, input, input_stride, t.batch, low);
    Activations a = ready(t, t.own->ready, input, k, input_stride, w[0].w);
    WorkCursor work = {items};
    for (int64_t item; (item = pool_next(t.pool, t.self, &work)) >= 0;) {
        int i = 0;
        while (item >= ends[i]) i++;
        const int64_t b = item - (ends[i] - w[i].l.blocks);
        if (!made_for(a, w[i].w)) a = ready(t, t.own->ready, input, k, input_stride, w[i].w);
        float tile[kMaxBatch][16];
        dot_block(w[i], b, a, 0, t.batch, tile);
        add_low_rank(w[i].w, b, sums[i], low.width, t.batch, tile);
        store_block(w[i], b, t.batch, tile, outputs[i], output_stride);
    }
    pool_wait(t.pool, t.self);
}

inline void norm_rows(const Worker& t, const ap_norm& norm, float* out) {
    const int64_t hidden = t.model->hidden;
    for (int64_t m = 0; m < t.batch; m++) {
        if (norm.weight) norm_row(t.own->hidden + m * hidden, norm, hidden, out + m * hidden);
        else memmove(out + m * hidden, t.own->hidden + m * hidden, static_cast<size_t>(hidden) * 4);
    }
}

// hidden += out, or its norm
inline void add_rows(const Worker& t, const float* out, const ap_norm& norm) {
    const int64_t hidden = t.model->hidden;
    for (int64_t m = 0; m < t.batch; m++) {
        const float* x = out + m * hidden;
        if (norm.weight) {
            norm_row(x, norm, hidden, t.own->input);
            x = t.own->input;
        }
        add_row_(t.own->hidden + m * hidden, x, hidden);
    }
}

// What a part of a layer reads: the norm of hidden, or hidden itself where norms stand behind the parts.
inline void begin_part(const Worker& t, const ap_layer& layer, const ap_norm& norm) {
    norm_rows(t, layer.post ? ap_norm{} : norm, t.own->input);
}

// hidden += out, or its norm `after`; where norms stand behind the parts, hidden becomes the norm of that.
inline void end_part(
    const Worker& t, const ap_layer& layer, const float* out, const ap_norm& after, const ap_norm& norm) {
    add_rows(t, out, after);
    if (layer.post) norm_rows(t, norm, t.own->hidden);
}

}  // namespace
