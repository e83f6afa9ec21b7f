// The memory of a decode step: the model's description and every buffer that its stages use.
#pragma once
#include "accelpatch_cpu.h"

constexpr int64_t kRunSlots = 64;  // what attention.h takes at a time

struct Scratch {    // each thread's own: what is cheaper to compute twice than to wait for
    float* hidden;  // [batch, hidden], the residual stream
    float* input;   // [batch, widest], what a stage's products read
    float* query;   // [heads / kv_heads, head_dim]
    void* ready;    // activation_bytes
    void* beside;   // the same, for a second weight that reads another form
};

struct Step {
    ap_model model;
    ap_layer* layers;
    int threads;
    bool ordered;  // a weight has an order of its own
    int64_t widest, longest_runs;
    // Shared between threads, each written in one stage and read in the next.
    float *cos, *sin;      // [2, batch, head_dim / 2]
    float* qkv;            // [batch, (heads + 2 kv_heads) * head_dim]
    float* partial;        // [batch, heads, runs, run_floats]
    float* attention_out;  // [batch, hidden]
    float* gated;          // [batch, intermediate]
    float* mlp_out;        // [batch, hidden]
    Scratch scratch[AP_MAX_THREADS];
    void* memory;  // all of it, one allocation
};
