// What each path (AVX-512, AVX2, Arm's dot products, portable) offers to api.cpp: jobs for a pool. All memory is the
// caller's.
#pragma once
#include "accelpatch_cpu.h"
#include "thread_pool.h"

struct LinearCall {
    const ap_linear* w;
    const void* x;
    void* y;
    int64_t m, x_stride, y_stride;
    int dtype;
    float* rows;  // [m, k], where dtype is not float32; for AP_W8A8 a row of each thread
    void* ready;  // activation_bytes
};

struct PanelsCall {
    const ap_linear* w;
    const float* x;
    int64_t m, x_stride;
    float* y;
    int64_t y_stride;
    float* room;     // panel_floats of each thread
    float* ordered;  // [m, k], where the weight has an order
};

struct GradientCall {
    const ap_linear* w;
    const float* dy;
    int64_t m, dy_stride;
    float* dx;
    int64_t dx_stride;
    int64_t columns;  // of dx that a thread computes at a time
    float* room;      // gradient_floats of each thread
};

struct NormCall {
    const float *x, *residual, *weight;
    float *y, *sum;
    int64_t m, k;
    float eps;
};

struct GatedCall {
    const float *gate, *up;
    float* y;
    int64_t count;
    int activation;
};

struct AttentionCall {
    ap_attention a;
    int64_t runs;    // of the longest sequence
    float* partial;  // [batch, heads, runs, run_floats]
};

struct PagesCall {
    ap_pages a;
    int64_t runs;    // of the longest row
    float* partial;  // [batch, heads, runs, run_floats]
    float* own;      // of each thread: keys and values [2, kRun, d] of a run, and a lone run's [group, run_floats]
};

struct StoredCall {
    const ap_stored* w;
    const float* x;  // NULL: y becomes the weight's values
    int64_t m, x_stride;
    float* y;
    int64_t y_stride;
};

struct Step;

struct StepCall {
    Step* step;
    int64_t batch;
    const int64_t *tokens, *slots, *starts, *positions;
    float* logits;
    int64_t first, last;   // layers
    float* hidden;         // [batch, hidden]: read where first > 0, written where last < layers
    const int64_t* index;  // [count] of pages: where slots lie
    int64_t count;
};

struct Kernels {
    int64_t (*activation_bytes)(int64_t tokens, int64_t k, bool ordered);
    int64_t (*panel_floats)(int64_t tokens);
    int64_t (*gradient_floats)(int64_t columns);
    Job linear, w8a8, panels, gradient, norm, gated, attention, pages, step, stored;
    void (*gather)(const ap_linear* w, const int64_t* ids, int64_t count, float* rows);
    void (*rope)(float* x, const float* cos, const float* sin, int64_t m, int64_t heads, int64_t d);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* dotprod_kernels();

const Kernels& chosen_kernels();
