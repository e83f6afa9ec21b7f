// Norms, rotary embedding and activations on rows of float32.
#pragma once
#include "accelpatch_cpu.h"
#include "vec.h"

namespace {

// y = x / sqrt(mean(x^2) + eps) * weight
inline void rmsnorm_row(const float* x, const float* weight, float eps, int64_t k, float* y) {
    vf squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= k; i += 4 * kLanes) {
        for (int j = 0; j < 4; j++) {
            const vf v = load(x + i + j * kLanes);
            squares[j] = fma(v, v, squares[j]);
        }
    }
    for (; i < k; i += kLanes) {
        const vf v = load_part(x + i, k - i < kLanes ? k - i : kLanes);
        squares[0] = fma(v, v, squares[0]);
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(k);
    const float inverse = 1.0f / sqrtf(mean + eps);
    for (i = 0; i + kLanes <= k; i += kLanes) store(y + i, load(x + i) * inverse * load(weight + i));
    for (; i < k; i++) y[i] = x[i] * inverse * weight[i];
}

// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias. bias: NULL for none.
inline void layernorm_row(const float* x, const float* weight, const float* bias, float eps, int64_t k, float* y) {
    vf sums = {}, squares = {};
    int64_t i = 0;
    for (; i < k; i += kLanes) sums += load_part(x + i, k - i < kLanes ? k - i : kLanes);
    const float mean = sum(sums) / static_cast<float>(k);
    for (i = 0; i + kLanes <= k; i += kLanes) {
        const vf v = load(x + i) - mean;
        squares = fma(v, v, squares);
    }
    float rest = 0;
    for (; i < k; i++) rest += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1.0f / sqrtf((sum(squares) + rest) / static_cast<float>(k) + eps);
    for (i = 0; i + kLanes <= k; i += kLanes) {
        const vf v = (load(x + i) - mean) * inverse * load(weight + i);
        store(y + i, bias ? v + load(bias + i) : v);
    }
    for (; i < k; i++) y[i] = (x[i] - mean) * inverse * weight[i] + (bias ? bias[i] : 0.0f);
}

inline void norm_row(const float* x, const ap_norm& norm, int64_t k, float* y) {
    if (norm.layer) layernorm_row(x, norm.weight, norm.bias, norm.eps, k, y);
    else rmsnorm_row(x, norm.weight, norm.eps, k, y);
}

// y += x
inline void add_row_(float* y, const float* x, int64_t k) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(y + i, load(y + i) + load(x + i));
    for (; i < k; i++) y[i] += x[i];
}

// Rotates the pairs (i, i + d / 2) of one head.
inline void rotate_(float* x, const float* cos, const float* sin, int64_t d) {
    float* y = x + d / 2;
    for (int64_t i = 0; i < d / 2; i++) {
        const float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

AP_INLINE vf activate(vf x, int activation) {
    if (activation == AP_SILU) return x / (1.0f + exp(-x));
    if (activation == AP_RELU) return x < 0.0f ? splat(0.0f) : x;  // NaN stays
    // 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u), which loses nothing where tanh(u) nears -1
    const vf u = x * (1.0f + 0.044715f * x * x) * 0.7978845608028654f;
    return x / (1.0f + exp(-2.0f * u));
}

inline float gelu_exact(float x) { return 0.5f * x * erfcf(-x * 0.70710678f); }

// y = activation(gate) * up
inline void gated_row(const float* gate, const float* up, int activation, int64_t count, float* y) {
    if (activation == AP_GELU) {
        for (int64_t i = 0; i < count; i++) y[i] = gelu_exact(gate[i]) * up[i];
        return;
    }
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(y + i, activate(load(gate + i), activation) * load(up + i));
    if (i < count)
        store_part(
            y + i, activate(load_part(gate + i, count - i), activation) * load_part(up + i, count - i), count - i);
}

// y = activation(x), which may be y
inline void activated_row(const float* x, int activation, int64_t count, float* y) {
    if (activation == AP_GELU) {
        for (int64_t i = 0; i < count; i++) y[i] = gelu_exact(x[i]);
        return;
    }
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(y + i, activate(load(x + i), activation));
    if (i < count) store_part(y + i, activate(load_part(x + i, count - i), activation), count - i);
}

// y = (up + 1) * gate / (1 + e^(-alpha gate)), both clamped; a NaN stays.
AP_INLINE vf clamped(vf gate, vf up, float alpha, float limit) {
    gate = gate > limit ? splat(limit) : gate;
    up = up > limit ? splat(limit) : up;
    up = up < -limit ? splat(-limit) : up;
    return (up + 1.0f) * (gate / (1.0f + exp(-alpha * gate)));
}

inline void clamped_row(const float* gate, const float* up, float alpha, float limit, int64_t count, float* y) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(y + i, clamped(load(gate + i), load(up + i), alpha, limit));
    if (i < count)
        store_part(
            y + i, clamped(load_part(gate + i, count - i), load_part(up + i, count - i), alpha, limit), count - i);
}

inline float softcap(float x, float cap) { return cap > 0 ? cap * tanh(splat(x / cap))[0] : x; }

}  // namespace
