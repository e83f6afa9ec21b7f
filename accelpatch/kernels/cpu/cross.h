// The part of a decoder layer that attends to an encoder's tokens: their keys and values were computed once, and a step
// only reads them.
#pragma once
#include "stage.h"

namespace {

inline void attend_encoded(const Worker& t, const ap_layer& layer, int64_t m, int64_t head, int64_t run) {
    const ap_encoded& encoded = t.model->encoded;
    const int64_t d = t.model->head_dim, heads = layer.cross_q.n / d, text = encoded.text[m], at = run * kRun;
    const int64_t left = encoded.ends[text] - at;
    if (left <= 0) return;
    const int64_t offset = ((text * heads + head) * encoded.length + at) * d;
    const int64_t stride = t.step->longest_runs * run_floats(d);
    const float* mask = encoded.mask ? encoded.mask + text * encoded.length + at : nullptr;
    attend_run(t.step->qkv + m * layer.cross_q.n + head * d, 1, layer.cross_keys + offset, layer.cross_values + offset,
        d, left < kRun ? left : kRun, layer.cross_scale, 0,
        t.step->partial + (m * heads + head) * stride + run * run_floats(d), stride, mask);
}

inline void cross_stages(const Worker& t, const ap_layer& layer) {
    const ap_encoded& encoded = t.model->encoded;
    const int64_t d = t.model->head_dim, hidden = t.model->hidden, width = layer.cross_q.n, heads = width / d;
    const ap_linear *q[] = {&layer.cross_q}, *o[] = {&layer.cross_o};
    begin_part(t, layer, layer.cross_norm);
    linears(t, q, &t.step->qkv, 1, t.own->input, hidden, hidden, width);
    int64_t most = 1;
    for (int64_t m = 0; m < t.batch; m++) {
        const int64_t count = runs(0, encoded.ends[encoded.text[m]] - 1);
        most = count > most ? count : most;
    }
    WorkCursor work = {t.batch * heads * most};
    for (int64_t item; (item = pool_next(t.pool, t.self, &work)) >= 0;)
        attend_encoded(t, layer, item / (heads * most), item / most % heads, item % most);
    pool_wait(t.pool, t.self);
    for (int64_t m = 0; m < t.batch; m++) {
        const int64_t count = runs(0, encoded.ends[encoded.text[m]] - 1);
        for (int64_t h = 0; h < heads; h++) {
            const float* partial = t.step->partial + (m * heads + h) * t.step->longest_runs * run_floats(d);
            join_runs(partial, count, d, nullptr, t.own->input + (m * heads + h) * d);
        }
    }
    linears(t, o, &t.step->attention_out, 1, t.own->input, width, width, hidden);
    end_part(t, layer, t.step->attention_out, ap_norm{}, layer.cross_norm);
}

}  // namespace
