// Norms of activations that are being staged. A token's result does not depend on other tokens, nor on M.
#pragma once
#include "stream.h"

// The place along K of a piece that the block of `rank` has staged. The blocks of a cluster take runs of `run` pieces
// in turn; run = 0: one block has all of K.
DEVICE int global_piece_of(int piece, int run, int rank) { return piece + (piece & -run) * (CLUSTER - 1) + rank * run; }

// Loads `count` 16-bit values, at most eight, one by one; the others are zero.
static __device__ __noinline__ Words4 load_part(const char* from, int count) {
    Words4 v = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {  // shifted in from the top, so that no array is indexed at run time
        const uint32_t value = i < count ? load_activation2(from + 2 * i) : 0u;
        v = {v.x >> 16 | v.y << 16, v.y >> 16 | v.z << 16, v.z >> 16 | v.w << 16, v.w >> 16 | value << 16};
    }
    return v;
}
// Loads eight 16-bit values from element `at` of a row of k elements; zeros past its end.
DEVICE Words4 load_chunk(const void* row, int at, int k, bool aligned) {
    const char* from = static_cast<const char*>(row) + int64_t(at) * 2;
    if (at >= k) return {0, 0, 0, 0};
    return aligned ? load_activation16(from) : load_part(from, k - at);
}

// The norm (x - mean) * scale * weight + bias of a token, rounded as the module's own output would be. CLUSTERED: the
// blocks of a cluster leave sums of runs of 8 lanes instead of 32, and total() adds these up first, in the same order.
template <class T, bool CLUSTERED, bool COMMON> struct Norms {
    static constexpr int BANDS = THREADS / 32;  // runs of 32 threads, each with a sum of its own
    static constexpr int PARTIALS = BANDS * (CLUSTERED ? 4 : 1);
    const GemvArgs& a;
    const GemvPlan& plan;
    // A word for block_any; from SHARED_WORD on, for a norm, the partial sums of squares of each token; after them, for
    // a LayerNorm, the partial sums.
    float* const moments;
    static constexpr int SHARED_WORD = 4;
    static int64_t floats(int norm) {
        return SHARED_WORD + (norm == NORM_NONE ? 0 : norm == NORM_LAYER ? 2 : 1) * PARTIALS * 8;
    }

    DEVICE Norms(const GemvArgs& a, const GemvPlan& plan, char* shared)
        : a(a),
          plan(plan),
          moments(reinterpret_cast<float*>(shared + plan.moments_at)) {}
    DEVICE float* squares() const { return moments + SHARED_WORD; }
    DEVICE float* sums() const { return squares() + PARTIALS * 8; }
    DEVICE uint32_t& shared_word() const { return *reinterpret_cast<uint32_t*>(moments); }
    DEVICE const char* row(int token) const {
        return static_cast<const char*>(a.x) + uint32_t(token) * (a.x_stride * 2);
    }

    // Adds up the threads' parts of a token's sum over runs of 32 threads, and stores these partial sums. Precondition:
    // every thread of a run calls it. A barrier must follow before total().
    static DEVICE void leave(float* moments, int token, float partial) {
        const float sum = run_sum(partial, 32);
        if (threadIdx.x % 32 == 0) moments[token * BANDS + threadIdx.x / 32] = sum;
    }
    DEVICE float total(const float* moments, int token) const {  // over K
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            if constexpr (CLUSTERED) {
                float part[4];
                load_floats<4>(part, moments + token * PARTIALS + i * 4);
                sum += (part[0] + part[1]) + (part[2] + part[3]);
            } else {
                sum += moments[token * BANDS + i];
            }
        }
        return sum / static_cast<float>(int(a.k));
    }
    // Whether activations from a step on may be read before the kernel before has stored them. Words that are not
    // stored yet are SENTINEL; only a single token has them.
    DEVICE bool signalled(int step) const {
        return LAUNCHES_OVERLAP && !CLUSTERED && a.m == 1 && step < plan.signalled_k_tiles * plan.k_tile_steps;
    }
    DEVICE bool layer() const { return !COMMON && a.norm == NORM_LAYER; }
    DEVICE bool aligned() const { return COMMON || plan.x_aligned; }
    DEVICE Words4 load(int token, int at) const { return load_chunk(row(token), at, int(a.k), aligned()); }
    DEVICE float mean(int token) const { return layer() ? total(sums(), token) : 0.f; }
    DEVICE float scale(int token) const { return rsqrtf(total(squares(), token) + a.epsilon); }
    static DEVICE float squares_of(const Words4& raw) {
        float v[8], even = 0.f, odd = 0.f;
        unpack<T>(raw, v);
#pragma unroll
        for (int e = 0; e < 8; e += 2) even = fmaf(v[e], v[e], even), odd = fmaf(v[e + 1], v[e + 1], odd);
        return even + odd;
    }
    static DEVICE float sum_of(const Words4& raw) {
        float v[8];
        unpack<T>(raw, v);
        return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
    // The sum of (x - mean)^2; values past K count as the mean.
    DEVICE float squares_of(const Words4& raw, int at, float mean) const {
        if (!layer()) return squares_of(raw);
        float v[8], even = 0.f, odd = 0.f;
        unpack<T>(raw, v);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const float d = at + e < int(a.k) ? v[e] - mean : 0.f, f = at + e + 1 < int(a.k) ? v[e + 1] - mean : 0.f;
            even = fmaf(d, d, even), odd = fmaf(f, f, odd);
        }
        return even + odd;
    }
    DEVICE Words4 weight(int at) const {
        return a.norm_weight ? load_chunk(a.norm_weight, at, int(a.k), aligned()) : Words4{0, 0, 0, 0};
    }
    DEVICE Words4 scaled(const Words4& raw, const Words4& weight, float scale) const {  // an RMSNorm
        float v[8], times[8];
        unpack<T>(raw, v), unpack<T>(weight, times);
        if (a.norm == NORM_RMS_PLUS_ONE || !a.norm_weight)
#pragma unroll
            for (int e = 0; e < 8; ++e) times[e] += 1.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = v[e] * scale * times[e];
        return pack<T>(v);
    }
    DEVICE Words4 apply(const Words4& raw, const Words4& weight, int at, float mean, float scale) const {
        if (!layer()) return scaled(raw, weight, scale);
        const Words4 bias = a.norm_bias ? load_chunk(a.norm_bias, at, int(a.k), aligned()) : Words4{0, 0, 0, 0};
        float v[8], times[8], shift[8];
        unpack<T>(raw, v), unpack<T>(weight, times), unpack<T>(bias, shift);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float normal = (v[e] - mean) * scale;
            v[e] = at + e < int(a.k) ? fmaf(normal, a.norm_weight ? times[e] : 1.f, shift[e]) : 0.f;
        }
        return pack<T>(v);
    }
    // A token's value k after the norm. mean, scale: those of the token.
    DEVICE float value(int token, int k, float mean, float scale) const {
        const auto at = [k](const void* from, float other) ALWAYS_INLINE {
            return from ? T::up(load_activation2(static_cast<const uint16_t*>(from) + k)) : other;
        };
        const float x = at(row(token), 0.f);
        if (a.norm == NORM_NONE) return x;
        const float times = at(a.norm_weight, 0.f) + (a.norm == NORM_RMS_PLUS_ONE || !a.norm_weight ? 1.f : 0.f);
        return T::up(T::down(layer() ? fmaf((x - mean) * scale, times, at(a.norm_bias, 0.f)) : x * scale * times));
    }
};
