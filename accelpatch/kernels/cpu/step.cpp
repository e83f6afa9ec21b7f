// Making, checking and running a decode step.
#include "step.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <new>

#include "kernels.h"
#include "layout.h"

namespace {

struct Owner {  // one step at a time on one set of buffers
    Step step;
    std::mutex lock;
};

constexpr int64_t kMost = 1 << 24;  // of any size

bool is_size(int64_t size) { return size >= 1 && size <= kMost; }

bool fits(const ap_linear& w, int64_t n, int64_t k) {
    const bool factors = w.down && w.up && (w.factors == AP_FLOAT32 || w.factors == AP_BFLOAT16);
    return w.n == n && w.k == k && readable(w) && (!w.rank || (is_size(w.rank) && factors));
}

bool is_absent(const ap_layer& l) { return !l.q.data; }

bool cache_fits(const ap_layer& l) {
    const bool scaled = l.cache == AP_CACHE_INT8 || l.cache == AP_CACHE_FP8;
    return l.keys && l.values && (!scaled || (l.key_scales && l.value_scales)) &&
           (scaled || l.cache == AP_CACHE_FLOAT || l.cache == AP_CACHE_BF16 || l.cache == AP_CACHE_PAGES);
}

// Whether the experts lie one after the other, and a router chooses among them.
bool experts_fit(const ap_model& m, const ap_layer& l) {
    const ap_linear& r = l.router;
    if (r.kind != AP_DENSE || r.n > AP_MAX_EXPERTS || !fits(r, r.n, m.hidden)) return false;
    for (const ap_linear* w : {&l.gate, &l.up, &l.down})
        if (w->order || w->kind == AP_W8A8 || w->rank) return false;
    return l.chosen >= 1 && l.chosen <= r.n && l.chosen <= AP_MAX_CHOSEN && l.expert_bytes > 0 && l.down_bytes > 0;
}

// Whether the attention to an encoder's tokens, where a layer has it, fits what the encoder gave.
bool cross_fits(const ap_model& m, const ap_layer& l) {
    if (!l.cross_q.data) return true;
    const int64_t query = l.cross_q.n;
    return m.encoded.length && is_size(query) && query % m.head_dim == 0 && fits(l.cross_q, query, m.hidden) &&
           fits(l.cross_o, m.hidden, query) && l.cross_keys && l.cross_values;
}

bool encoded_fits(const ap_model& m) {
    const ap_encoded& e = m.encoded;
    if (!e.length) return true;
    if (!is_size(e.length) || e.texts < 1 || e.texts > m.max_batch || !e.text || !e.ends) return false;
    for (int64_t i = 0; i < m.max_batch; i++)
        if (e.text[i] < 0 || e.text[i] >= e.texts) return false;
    for (int64_t i = 0; i < e.texts; i++)
        if (e.ends[i] < 1 || e.ends[i] > e.length) return false;
    return true;
}

bool layer_fits(const ap_model& m, const ap_layer& l) {
    const int64_t query = l.q.n, key = l.k.n, inner = l.gate.n;
    if (!is_size(query) || !is_size(key) || !is_size(inner) || query % m.head_dim || key % m.head_dim || query % key)
        return false;
    if (l.activation < AP_SILU || l.activation > (l.router.data ? AP_CLAMPED : AP_RELU)) return false;
    if (l.router.data && (!experts_fit(m, l) || l.post)) return false;
    if (m.score_bias && m.biased_heads != query / m.head_dim) return false;
    return cross_fits(m, l) && fits(l.q, query, m.hidden) && fits(l.k, key, m.hidden) && fits(l.v, key, m.hidden) &&
           fits(l.o, m.hidden, query) && fits(l.gate, inner, m.hidden) && (!l.up.data || fits(l.up, inner, m.hidden)) &&
           fits(l.down, m.hidden, inner) && cache_fits(l) && l.window >= 0 &&
           (l.rope == -1 || ((l.rope == 0 || l.rope == 1) && m.inverse_frequency[l.rope]));
}

bool model_fits(const ap_model& m) {
    for (int64_t size : {m.layers, m.hidden, m.head_dim, m.length, m.embedding.n, m.head.n})
        if (!is_size(size)) return false;
    if (m.max_batch < 1 || m.max_batch > kMaxBatch || m.head_dim % 2 || m.pages < 0) return false;
    if (m.pages && m.one_sequence) return false;
    if (!encoded_fits(m) || (m.positions && !is_size(m.position_rows))) return false;
    if (!m.layer || !fits(m.embedding, m.embedding.n, m.hidden) || !fits(m.head, m.head.n, m.hidden)) return false;
    for (int64_t i = 0; i < m.layers; i++)
        if (!is_absent(m.layer[i]) &&
            (!layer_fits(m, m.layer[i]) || (m.layer[i].cache == AP_CACHE_PAGES) != (m.pages > 0)))
            return false;
    return true;
}

Largest largest_of(const ap_model& m) {
    Largest most;
    auto take = [](int64_t& place, int64_t size) { place = size > place ? size : place; };
    take(most.widest, m.hidden);
    take(most.ranks, m.head.rank);
    for (int64_t i = 0; i < m.layers; i++) {
        const ap_layer& l = m.layer[i];
        if (is_absent(l)) continue;
        take(most.heads, heads_of(m, l));
        take(most.group, l.q.n / l.k.n);
        take(most.qkv, l.q.n + 2 * l.k.n);
        take(most.heads, l.cross_q.n / m.head_dim);
        take(most.qkv, l.cross_q.n);
        take(most.widest, l.cross_q.n);
        take(most.intermediate, l.gate.n);
        take(most.widest, l.q.n);
        take(most.widest, l.gate.n);
        for (int64_t ranks : {l.q.rank + l.k.rank + l.v.rank, l.o.rank, l.gate.rank + l.up.rank, l.down.rank,
                 l.cross_q.rank, l.cross_o.rank})
            take(most.ranks, ranks);
        if (!l.router.data) continue;
        take(most.experts, l.router.n);
        take(most.chosen, l.chosen);
    }
    return most;
}

// Hands out memory piece by piece; with no memory behind it, only counts.
struct Purse {
    char* at;
    int64_t used = 0;
    template <class T> void reserve(T*& place, int64_t bytes) {
        if (at) place = reinterpret_cast<T*>(at + used);
        used += round_up(bytes, 64);
    }
};

int64_t lay_out(Step& s, char* memory) {
    const ap_model& m = s.model;
    const Largest& most = s.largest;
    const int64_t b = m.max_batch, d = m.head_dim;
    Purse purse = {memory};
    const int64_t one = chosen_kernels().activation_bytes(b, most.widest, s.ordered);
    const int64_t each = chosen_kernels().activation_bytes(b * most.chosen, most.intermediate, s.ordered);
    purse.reserve(s.layers, m.layers * static_cast<int64_t>(sizeof(ap_layer)));
    purse.reserve(s.cos, 2 * b * (d / 2) * 4);
    purse.reserve(s.sin, 2 * b * (d / 2) * 4);
    purse.reserve(s.qkv, b * most.qkv * 4);
    purse.reserve(s.partial, b * most.heads * s.longest_runs * round_up(d + 2, 16) * 4);
    purse.reserve(s.attention_out, b * m.hidden * 4);
    purse.reserve(s.router, b * most.experts * 4);
    purse.reserve(s.gated, b * most.chosen * most.intermediate * 4);
    purse.reserve(s.mlp_out, b * m.hidden * 4);
    purse.reserve(s.low, b * most.ranks * 4);
    for (int i = 0; i < s.threads; i++) {
        purse.reserve(s.scratch[i].hidden, b * m.hidden * 4);
        purse.reserve(s.scratch[i].input, b * most.widest * 4);
        purse.reserve(s.scratch[i].query, most.group * d * 4);
        purse.reserve(s.scratch[i].keys, kRunSlots * d * 4);
        purse.reserve(s.scratch[i].values, kRunSlots * d * 4);
        purse.reserve(s.scratch[i].ready, one > each ? one : each);
        purse.reserve(s.scratch[i].beside, chosen_kernels().activation_bytes(b, m.hidden, s.ordered));
        purse.reserve(s.scratch[i].experts, b * most.chosen * 4);
        purse.reserve(s.scratch[i].weights, b * most.chosen * 4);
    }
    return purse.used;
}

// Weights whose orders are equal get one, so that x is put into it once for all of them.
void join_orders(ap_layer& l, const ap_model& m) {
    auto join = [&](const ap_linear& first, ap_linear& other) {
        const bool both = first.order && other.order;
        if (both && !memcmp(first.order, other.order, static_cast<size_t>(m.hidden) * sizeof(int32_t)))
            other.order = first.order;
    };
    join(l.q, l.k), join(l.q, l.v), join(l.k, l.v), join(l.gate, l.up);
}

bool has_order(const ap_model& m) {
    bool found = m.embedding.order || m.head.order;
    for (int64_t i = 0; i < m.layers; i++)
        for (const ap_linear* w = &m.layer[i].q; w <= &m.layer[i].cross_o; w++) found |= w->order != nullptr;
    return found;
}

bool call_fits(const Step& s, const StepCall& c) {
    const ap_model& m = s.model;
    const bool part = c.first > 0 || c.last < m.layers;
    if (c.first < 0 || c.first > c.last || c.last > m.layers || (part && !c.hidden)) return false;
    for (int64_t i = c.first; i < c.last; i++)
        if (is_absent(s.layers[i])) return false;
    if (c.batch < 1 || c.batch > m.max_batch || !c.tokens || !c.slots || !c.starts || !c.positions) return false;
    for (int64_t b = 0; b < c.batch; b++) {
        if (c.tokens[b] < 0 || c.tokens[b] >= m.embedding.n || c.positions[b] < 0) return false;
        if (m.positions && c.positions[b] >= m.position_rows) return false;
        if (c.starts[b] < 0 || c.starts[b] > c.slots[b]) return false;
        if (!m.pages && c.slots[b] >= m.length) return false;
        if (m.pages && (c.slots[b] >= c.count || c.slots[b] - c.starts[b] >= m.length)) return false;
    }
    if ((m.pages > 0) != (c.index != nullptr)) return false;
    for (int64_t i = 0; i < c.count; i++)
        if (c.index[i] < 0 || c.index[i] >= m.pages) return false;
    return true;
}

int run(Owner* owner, const StepCall& given, int threads) {
    StepCall call = given;
    if (!call_fits(owner->step, call)) return AP_BAD_ARGUMENT;
    std::lock_guard<std::mutex> lock(owner->lock);
    // `step` of this CPU's table of kernels is step_job in decode.h, which every thread runs.
    pool_run(
        threads < owner->step.threads ? threads : owner->step.threads, chosen_kernels().step, &call, POOL_DECODING);
    return AP_OK;
}

}  // namespace

extern "C" int ap_step_create(const ap_model* model, int max_threads, void** step) {
    if (!model || !step || max_threads < 1 || max_threads > AP_MAX_THREADS || !model_fits(*model))
        return AP_BAD_ARGUMENT;
    auto* owner = new (std::nothrow) Owner{};
    if (!owner) return AP_NO_MEMORY;
    Step& s = owner->step;
    s.model = *model;
    s.threads = max_threads;
    s.ordered = has_order(*model);
    s.largest = largest_of(*model);
    const int64_t longest = model->length > model->encoded.length ? model->length : model->encoded.length;
    s.longest_runs = (longest + kRunSlots - 1) / kRunSlots;
    s.memory = aligned_alloc(64, static_cast<size_t>(round_up(lay_out(s, nullptr), 64)));
    if (!s.memory) {
        delete owner;
        return AP_NO_MEMORY;
    }
    lay_out(s, static_cast<char*>(s.memory));
    memcpy(s.layers, model->layer, static_cast<size_t>(model->layers) * sizeof(ap_layer));
    for (int64_t i = 0; i < model->layers; i++)
        if (!is_absent(s.layers[i])) join_orders(s.layers[i], *model);
    *step = owner;
    return AP_OK;
}

extern "C" void ap_step_free(void* step) {
    auto* owner = static_cast<Owner*>(step);
    if (!owner) return;
    free(owner->step.memory);
    delete owner;
}

extern "C" int ap_step_run(void* step, int64_t batch, const int64_t* tokens, const int64_t* slots,
    const int64_t* starts, const int64_t* positions, int64_t first, int64_t last, float* hidden, float* logits,
    int threads) {
    auto* owner = static_cast<Owner*>(step);
    if (!owner) return AP_BAD_ARGUMENT;
    return run(owner, {&owner->step, batch, tokens, slots, starts, positions, logits, first, last, hidden, nullptr, 0},
        threads);
}

extern "C" int ap_step_run_pages(void* step, int64_t batch, const int64_t* tokens, const int64_t* slots,
    const int64_t* starts, const int64_t* positions, const int64_t* index, int64_t count, float* logits, int threads) {
    auto* owner = static_cast<Owner*>(step);
    if (!owner || !index || !logits) return AP_BAD_ARGUMENT;
    const int64_t layers = owner->step.model.layers;
    return run(owner, {&owner->step, batch, tokens, slots, starts, positions, logits, 0, layers, nullptr, index, count},
        threads);
}
