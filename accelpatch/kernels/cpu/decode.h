// One decode step on a pool of threads: five stages a layer (six with experts), a wait between them. Each thread keeps
// the residual stream and makes norms for itself (a few microseconds' work that would otherwise need waits), and takes
// blocks of rows of the products.
#pragma once
#include "cache_rows.h"
#include "cross.h"
#include "experts.h"
#include "stage.h"

namespace {

inline void embed(const Worker& t) {
    const int64_t hidden = t.model->hidden;
    const Weight w = weight_of(t.model->embedding);
    for (int64_t m = 0; m < t.batch; m++) {
        float* row = t.own->hidden + m * hidden;
        gather_row(w, t.call->tokens[m], row);
        if (t.model->embedding_scale != 1.0f)
            for (int64_t k = 0; k < hidden; k++) row[k] *= t.model->embedding_scale;
        if (t.model->positions) add_row_(row, t.model->positions + t.call->positions[m] * hidden, hidden);
    }
    if (t.model->embedding_norm.weight) norm_rows(t, t.model->embedding_norm, t.own->hidden);
}

// One thread's work, done before the first wait; read from the second stage on.
inline void rotary_angles(const Worker& t) {
    const int64_t pairs = t.model->head_dim / 2;
    for (int r = 0; r < 2; r++) {
        const float* frequency = t.model->inverse_frequency[r];
        for (int64_t m = 0; m < t.batch && frequency; m++) {
            for (int64_t i = 0; i < pairs; i++) {
                const float angle = static_cast<float>(t.call->positions[m]) * frequency[i];
                const int64_t at = (r * t.model->max_batch + m) * pairs + i;
                t.step->cos[at] = cosf(angle) * t.model->rope_scaling[r];
                t.step->sin[at] = sinf(angle) * t.model->rope_scaling[r];
            }
        }
    }
}

inline void norm_and_rotate_(const Worker& t, const ap_layer& layer, float* head, const ap_norm& norm, int64_t m) {
    const int64_t d = t.model->head_dim, at = (layer.rope * t.model->max_batch + m) * (d / 2);
    if (norm.weight) rmsnorm_row(head, norm.weight, norm.eps, d, head);
    if (layer.rope >= 0) rotate_(head, t.step->cos + at, t.step->sin + at, d);
}

inline int64_t qkv_width(const ap_layer& layer) { return layer.q.n + 2 * layer.k.n; }

// The cache of one key head; bytes: of a number.
inline CacheRows rows_of(const Worker& t, const ap_layer& layer, void* codes, uint16_t* scales, int64_t head) {
    const int64_t d = t.model->head_dim;
    if (layer.cache == AP_CACHE_PAGES)
        return {layer.cache, static_cast<float*>(codes) + head * d, nullptr, t.call->index, layer.k.n};
    const int64_t at = head * t.model->length;
    const int64_t bytes = layer.cache == AP_CACHE_FLOAT ? 4 : layer.cache == AP_CACHE_BF16 ? 2 : 1;
    return {layer.cache, static_cast<char*>(codes) + at * d * bytes, scales ? scales + at : nullptr, nullptr, d};
}

// Writes the token's key and value of one key head into the cache.
inline void write_cache(
    const Worker& t, const ap_layer& layer, int64_t m, int64_t head, const CacheRows& keys, const CacheRows& values) {
    const int64_t d = t.model->head_dim, slot = t.call->slots[m];
    const float* row = t.step->qkv + m * qkv_width(layer);
    const float *key = row + layer.q.n + head * d, *value = row + layer.q.n + layer.k.n + head * d;
    const bool plain = layer.cache == AP_CACHE_FLOAT || layer.cache == AP_CACHE_PAGES;
    float* into = plain ? float_row(keys, slot, d) : t.own->query;  // where nothing is read yet
    memcpy(into, key, static_cast<size_t>(d) * 4);
    norm_and_rotate_(t, layer, into, layer.k_norm, m);
    if (plain) {
        memcpy(float_row(values, slot, d), value, static_cast<size_t>(d) * 4);
    } else {
        write_row(keys, slot, d, into);
        write_row(values, slot, d, value);
    }
}

// `count` rows from a slot on as floats: where they lie, or in `into`.
inline const float* floats_of(const CacheRows& c, int64_t at, int64_t count, int64_t d, float* into) {
    if (c.format == AP_CACHE_FLOAT) return static_cast<const float*>(c.codes) + at * d;
    read_rows(c, at, count, d, into);
    return into;
}

// The place, among the heads of a layer's cache, of one key head of a token's sequence.
inline int64_t cached_head(const Worker& t, const ap_layer& layer, int64_t m, int64_t head) {
    return (t.model->one_sequence || t.model->pages ? 0 : m) * kv_heads_of(*t.model, layer) + head;
}

inline void attend(const Worker& t, const ap_layer& layer, int64_t m, int64_t head, int64_t run) {
    const ap_model& model = *t.model;
    const int64_t d = model.head_dim, heads = heads_of(model, layer), kv_heads = kv_heads_of(model, layer),
                  group = heads / kv_heads;
    const int64_t slot = t.call->slots[m], first = first_slot(slot, t.call->starts[m], layer.window);
    if (run >= runs(first, slot)) return;
    const int64_t row = cached_head(t, layer, m, head);
    const CacheRows keys = rows_of(t, layer, layer.keys, layer.key_scales, row);
    const CacheRows values = rows_of(t, layer, layer.values, layer.value_scales, row);
    if (!model.one_sequence && run == runs(first, slot) - 1) write_cache(t, layer, m, head, keys, values);
    memcpy(t.own->query, t.step->qkv + m * qkv_width(layer) + head * group * d, static_cast<size_t>(group * d) * 4);
    for (int64_t h = 0; h < group; h++) norm_and_rotate_(t, layer, t.own->query + h * d, layer.q_norm, m);
    const int64_t at = first + run * kRun, count = slot - at + 1 < kRun ? slot - at + 1 : kRun;
    const int64_t stride = t.step->longest_runs * run_floats(d);
    float* partial = t.step->partial + (m * heads + head * group) * stride + run * run_floats(d);
    const float* bias = model.score_bias;
    if (bias) bias += (head * group + 1) * model.length - 1 - slot + at;
    attend_run(t.own->query, group, floats_of(keys, at, count, d, t.own->keys),
        floats_of(values, at, count, d, t.own->values), d, count, layer.attention_scale, layer.attention_softcap,
        partial, stride, bias, model.length);
}

inline void attention_stage(const Worker& t, const ap_layer& layer) {
    int64_t most = 1;
    for (int64_t m = 0; m < t.batch; m++) {
        const int64_t count = runs(first_slot(t.call->slots[m], t.call->starts[m], layer.window), t.call->slots[m]);
        most = count > most ? count : most;
    }
    const int64_t heads = kv_heads_of(*t.model, layer);
    if (t.model->one_sequence) {  // a token attends to those before it in the same step
        WorkCursor writes = {t.batch * heads};
        for (int64_t item; (item = pool_next(t.pool, t.self, &writes)) >= 0;) {
            const int64_t m = item / heads, head = item % heads;
            const int64_t row = cached_head(t, layer, m, head);
            write_cache(t, layer, m, head, rows_of(t, layer, layer.keys, layer.key_scales, row),
                rows_of(t, layer, layer.values, layer.value_scales, row));
        }
        pool_wait(t.pool, t.self);
    }
    WorkCursor work = {t.batch * heads * most};
    for (int64_t item; (item = pool_next(t.pool, t.self, &work)) >= 0;)
        attend(t, layer, item / (heads * most), item / most % heads, item % most);
    pool_wait(t.pool, t.self);
}

inline void join_attention(const Worker& t, const ap_layer& layer) {
    const int64_t heads = heads_of(*t.model, layer), d = t.model->head_dim;
    for (int64_t m = 0; m < t.batch; m++) {
        const int64_t count = runs(first_slot(t.call->slots[m], t.call->starts[m], layer.window), t.call->slots[m]);
        for (int64_t h = 0; h < heads; h++) {
            const float* partial = t.step->partial + (m * heads + h) * t.step->longest_runs * run_floats(d);
            join_runs(partial, count, d, sink_of(layer.sinks, h), t.own->input + (m * heads + h) * d);
        }
    }
}

// The MLP's first linear layer and its activation, where it has no gate.
inline void activated_up(const Worker& t, const ap_layer& layer) {
    const Weight up = weight_of(layer.gate);
    const int64_t width = layer.gate.n, hidden = t.model->hidden;
    const ap_linear* one[] = {&layer.gate};
    const LowRank low = low_rank_of(t);
    low_rank_stage(t.pool, t.self, one, 1, t.own->input, hidden, t.batch, low);
    const Activations a = ready(t, t.own->ready, t.own->input, hidden, hidden, up.w);
    WorkCursor work = {up.l.blocks};
    for (int64_t b; (b = pool_next(t.pool, t.self, &work)) >= 0;) {
        float tile[kMaxBatch][16];
        dot_block(up, b, a, 0, t.batch, tile);
        add_low_rank(up.w, b, low.sums, low.width, t.batch, tile);
        store_block(up, b, t.batch, tile, t.step->gated, width);
        for (int64_t m = 0; m < t.batch; m++) {
            float* y = t.step->gated + m * width + b * kBlockRows;
            activated_row(y, layer.activation, rows_in(up, b), y);
        }
    }
    pool_wait(t.pool, t.self);
}

inline void gate_and_up(const Worker& t, const ap_layer& layer) {
    const Weight gate = weight_of(layer.gate), up = weight_of(layer.up);
    const int64_t width = layer.gate.n, hidden = t.model->hidden;
    const ap_linear* both[] = {&layer.gate, &layer.up};
    const LowRank low = low_rank_of(t);
    low_rank_stage(t.pool, t.self, both, 2, t.own->input, hidden, t.batch, low);
    const Activations of_gate = ready(t, t.own->ready, t.own->input, hidden, hidden, gate.w);
    const Activations of_up =
        made_for(of_gate, up.w) ? of_gate : ready(t, t.own->beside, t.own->input, hidden, hidden, up.w);
    WorkCursor work = {gate.l.blocks};
    for (int64_t b; (b = pool_next(t.pool, t.self, &work)) >= 0;) {
        float g[kMaxBatch][16], u[kMaxBatch][16];
        dot_block(gate, b, of_gate, 0, t.batch, g);
        dot_block(up, b, of_up, 0, t.batch, u);
        add_low_rank(gate.w, b, low.sums, low.width, t.batch, g);
        add_low_rank(up.w, b, low.sums + gate.w.rank, low.width, t.batch, u);
        const int64_t rows = rows_in(gate, b);
        const float *gate_bias = bias_after(gate, b), *up_bias = bias_after(up, b);
        for (int64_t m = 0; m < t.batch; m++) {
            for (int64_t row = 0; row < rows; row++) {
                if (gate_bias) g[m][row] += gate_bias[row];
                if (up_bias) u[m][row] += up_bias[row];
            }
            gated_row(g[m], u[m], layer.activation, rows, t.step->gated + m * width + b * kBlockRows);
        }
    }
    pool_wait(t.pool, t.self);
}

inline void layer_stages(const Worker& t, const ap_layer& layer) {
    const int64_t hidden = t.model->hidden, query = layer.q.n, inner = layer.gate.n;
    float* qkv = t.step->qkv;
    const ap_linear* three[] = {&layer.q, &layer.k, &layer.v};
    float* const outputs[] = {qkv, qkv + query, qkv + query + layer.k.n};
    begin_part(t, layer, layer.attention_norm);
    linears(t, three, outputs, 3, t.own->input, hidden, hidden, qkv_width(layer));
    attention_stage(t, layer);
    join_attention(t, layer);
    const ap_linear* o[] = {&layer.o};
    linears(t, o, &t.step->attention_out, 1, t.own->input, query, query, hidden);
    end_part(t, layer, t.step->attention_out, layer.after_attention_norm, layer.attention_norm);
    if (layer.cross_q.data) cross_stages(t, layer);
    begin_part(t, layer, layer.mlp_norm);
    if (layer.router.data) return experts_stages(t, layer);
    if (layer.up.data) gate_and_up(t, layer);
    else activated_up(t, layer);
    const ap_linear* down[] = {&layer.down};
    linears(t, down, &t.step->mlp_out, 1, t.step->gated, inner, inner, hidden);
    end_part(t, layer, t.step->mlp_out, layer.after_mlp_norm, layer.mlp_norm);
}

inline void head_stage(const Worker& t) {
    const ap_model& model = *t.model;
    norm_rows(t, model.final_norm, t.own->input);
    const ap_linear* head[] = {&model.head};
    float* const logits[] = {t.call->logits};
    linears(t, head, logits, 1, t.own->input, model.hidden, model.hidden, model.head.n);
    if (model.logits_softcap <= 0) return;
    const int64_t count = t.batch * model.head.n, threads = pool_count(t.pool);
    for (int64_t i = count * t.self / threads; i < count * (t.self + 1) / threads; i++)
        t.call->logits[i] = softcap(t.call->logits[i], model.logits_softcap);
}

inline void step_job(void* argument, ThreadPool* pool, int self) {
    const auto* call = static_cast<const StepCall*>(argument);
    Step* step = call->step;
    const Worker t = {call, step, &step->model, &step->scratch[self], pool, self, call->batch};
    const int64_t layers = step->model.layers;
    const auto bytes = static_cast<size_t>(call->batch * step->model.hidden) * 4;
    if (self == 0) rotary_angles(t);
    if (call->first > 0) memcpy(t.own->hidden, call->hidden, bytes);
    else embed(t);
    for (int64_t i = call->first; i < call->last; i++) layer_stages(t, step->layers[i]);
    if (call->last < layers) {
        pool_wait(pool, self);  // nobody may still be reading what one of us writes
        if (self == 0) memcpy(call->hidden, t.own->hidden, bytes);
    } else if (call->logits) {
        head_stage(t);
    }
}

}  // namespace
