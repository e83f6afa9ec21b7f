// The memory of a decode step: the model's description and every buffer that its stages use.
#pragma once
#include "accelpatch_cpu.h"

constexpr int64_t kRunSlots = 64;  // what attention.h takes at a time

struct Scratch {           // each thread's own: what is cheaper to compute twice than to wait for
    float* hidden;         // [batch, hidden], the residual stream
    float* input;          // [batch, widest], what a stage's products read
    float* query;          // [group, head_dim]
    float *keys, *values;  // [kRunSlots, head_dim], of a cache in another format
    void* ready;           // activation_bytes
    void* beside;          // the same, for a second weight that reads another form
    int32_t* experts;      // [batch, chosen]: of each token, in the order of its router's logits
    float* weights;        // [batch, chosen]
};

// The largest sizes of all layers. group: query heads a key head. qkv: rows of q, k and v. widest: of what a product
// reads. ranks: of the adapters of a stage's weights. experts: of a layer. chosen: experts of a token; 1 where there
// are none.
struct Largest {
    int64_t heads = 0, group = 0, qkv = 0, intermediate = 0, widest = 0, ranks = 0, experts = 0, chosen = 1;
};

struct Step {
    ap_model model;
    ap_layer* layers;
    int threads;
    bool ordered;  // a weight has an order of its own
    Largest largest;
    int64_t longest_runs;
    // Shared between threads, each written in one stage and read in the next.
    float *cos, *sin;      // [2, batch, head_dim / 2]
    float* qkv;            // [batch, qkv]
    float* partial;        // [batch, heads, runs, run_floats]
    float* attention_out;  // [batch, hidden]
    float* router;         // [batch, experts]: logits
    float* gated;          // [batch, chosen, intermediate]
    float* mlp_out;        // [batch, hidden]
    float* low;            // [batch, ranks]
    Scratch scratch[AP_MAX_THREADS];
    void* memory;  // all of it, one allocation
};

inline int64_t heads_of(const ap_model& m, const ap_layer& l) { return l.q.n / m.head_dim; }
inline int64_t kv_heads_of(const ap_model& m, const ap_layer& l) { return l.k.n / m.head_dim; }
