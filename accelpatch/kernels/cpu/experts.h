// An MLP of experts in a decode step: the router's products, then gate and up of the chosen experts, then their down
// and the weighted sum. Only the chosen experts are read, each block once for all tokens that chose it.
#pragma once
#include "stage.h"

namespace {

AP_INLINE bool is_above(float a, float b) { return a > b || (a != a && b == b); }  // a NaN is the largest, as of torch

// The `chosen` largest of a token's logits, the first of equal ones, and their parts of the softmax.
inline void choose_experts(
    const float* logits, int64_t experts, int64_t chosen, bool normalise, int32_t* ids, float* weights) {
    uint8_t taken[AP_MAX_EXPERTS] = {};
    for (int64_t j = 0; j < chosen; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++)
            if (!taken[e] && (best < 0 || is_above(logits[e], logits[best]))) best = e;
        taken[best] = 1;
        ids[j] = static_cast<int32_t>(best);
    }
    const float most = logits[ids[0]];
    float total = 0;
    for (int64_t e = 0; e < experts; e += kLanes) {
        const int64_t left = experts - e < kLanes ? experts - e : kLanes;
        const vf part = exp(load_part(logits + e, left) - most);
        for (int64_t i = 0; i < left && !normalise; i++) total += part[i];
    }
    for (int64_t j = 0; j < chosen; j++) {
        weights[j] = exp(splat(logits[ids[j]] - most))[0];
        if (normalise) total += weights[j];
    }
    for (int64_t j = 0; j < chosen; j++) weights[j] /= total;
}

// A weight of one expert, of which `first` is the first one's. bytes, biases: to that of the next.
inline Weight of_expert(const Weight& first, int64_t expert, int64_t bytes, int64_t biases) {
    Weight w = first;
    w.w.data = static_cast<const char*>(w.w.data) + expert * bytes;
    if (w.w.bias) w.w.bias += expert * biases;
    return w;
}

// A token's products with a block of an expert's rows, bias included.
inline void expert_rows(const Weight& w, int64_t b, const Activations& a, int64_t token, float (*y)[16]) {
    dot_block(w, b, a, token, 1, y);
    const float* bias = bias_after(w, b);
    for (int64_t row = 0; bias && row < rows_in(w, b); row++) y[0][row] += bias[row];
}

// Whether an earlier token of the step takes the expert at place `pair` of all choices.
inline bool is_taken_before(const int32_t* experts, int64_t pair) {
    for (int64_t i = 0; i < pair; i++)
        if (experts[i] == experts[pair]) return true;
    return false;
}

inline void experts_gate_and_up(const Worker& t, const ap_layer& layer) {
    const Weight gate = weight_of(layer.gate), up = weight_of(layer.up);
    const int64_t inner = layer.gate.n, hidden = t.model->hidden, pairs = t.batch * layer.chosen;
    const int32_t* experts = t.own->experts;
    const Activations a = ready(t, t.own->ready, t.own->input, hidden, hidden, gate.w);
    WorkCursor work = {pairs * gate.l.blocks};
    for (int64_t item; (item = pool_next(t.pool, t.self, &work)) >= 0;) {
        const int64_t first = item / gate.l.blocks, b = item % gate.l.blocks;
        if (is_taken_before(experts, first)) continue;
        const Weight of_gate = of_expert(gate, experts[first], layer.expert_bytes, 2 * inner);
        const Weight of_up = of_expert(up, experts[first], layer.expert_bytes, 2 * inner);
        for (int64_t pair = first; pair < pairs; pair++) {
            if (experts[pair] != experts[first]) continue;
            float g[1][16], u[1][16];
            expert_rows(of_gate, b, a, pair / layer.chosen, g);
            expert_rows(of_up, b, a, pair / layer.chosen, u);
            float* y = t.step->gated + pair * inner + b * kBlockRows;
            if (layer.activation == AP_CLAMPED) clamped_row(g[0], u[0], layer.alpha, layer.limit, rows_in(gate, b), y);
            else gated_row(g[0], u[0], layer.activation, rows_in(gate, b), y);
        }
    }
    pool_wait(t.pool, t.self);
}

inline void experts_down(const Worker& t, const ap_layer& layer) {
    const Weight down = weight_of(layer.down);
    const int64_t inner = layer.gate.n, hidden = t.model->hidden, pairs = t.batch * layer.chosen;
    Activations a = activations_in(t.own->ready, pairs, inner);
    describe(a, t.step->gated, inner, down.w);
    prepare(a, 0, pairs);
    WorkCursor work = {down.l.blocks};
    for (int64_t b; (b = pool_next(t.pool, t.self, &work)) >= 0;) {
        float sum[kMaxBatch][16] = {};
        for (int64_t pair = 0; pair < pairs; pair++) {
            float y[1][16];
            expert_rows(of_expert(down, t.own->experts[pair], layer.down_bytes, hidden), b, a, pair, y);
            for (int64_t row = 0; row < rows_in(down, b); row++)
                sum[pair / layer.chosen][row] += t.own->weights[pair] * y[0][row];
        }
        for (int64_t m = 0; m < t.batch; m++)
            memcpy(t.step->mlp_out + m * hidden + b * kBlockRows, sum[m], static_cast<size_t>(rows_in(down, b)) * 4);
    }
    pool_wait(t.pool, t.self);
}

// From the norm of the MLP, which lies in `input`, to the residual stream.
inline void experts_stages(const Worker& t, const ap_layer& layer) {
    const int64_t hidden = t.model->hidden, experts = layer.router.n;
    const ap_linear* router[] = {&layer.router};
    linears(t, router, &t.step->router, 1, t.own->input, hidden, hidden, experts);
    for (int64_t m = 0; m < t.batch; m++)
        choose_experts(t.step->router + m * experts, experts, layer.chosen, layer.normalise,
            t.own->experts + m * layer.chosen, t.own->weights + m * layer.chosen);
    experts_gate_and_up(t, layer);
    experts_down(t, layer);
    add_rows(t, t.step->mlp_out, layer.after_mlp_norm);
}

}  // namespace
