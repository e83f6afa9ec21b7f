// Activations into shared memory: copy, norm, sums a group. One token's result never depends on another's, nor on M.
#pragma once
#include "fragment.h"
#include "gemv.h"

template <class T> DEVICE void unpack(const Words4& v, float* out) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = T::up(w[i] & 0xffffu), out[2 * i + 1] = T::up_high(w[i]);
}
template <class T> DEVICE Words4 pack(const float* v) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = T::down(v[2 * i]) | (T::down(v[2 * i + 1]) << 16);
    return {w[0], w[1], w[2], w[3]};
}
// Eight 16-bit values from element `at` of a row of `k`; zeros past its end.
DEVICE Words4 load_chunk(const void* row, int64_t at, int64_t k, bool aligned) {
    const char* from = static_cast<const char*>(row) + at * 2;
    if (at >= k) return {0, 0, 0, 0};
    if (aligned) return load_activation16(from);
    Words4 v = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {  // shifted in from the top: no array is indexed at run time
        const uint32_t value = at + i < k ? load_activation2(from + 2 * i) : 0u;
        v = {v.x >> 16 | v.y << 16, v.y >> 16 | v.z << 16, v.z >> 16 | v.w << 16, v.w >> 16 | value << 16};
    }
    return v;
}

template <class F, class T, int THREADS> struct Stager {
    static constexpr int BANDS = THREADS / 32;  // runs of 32 lanes that add up together
    const GemvArgs& a;
    const GemvPlan& plan;
    char* shared;
    int turn = 0;
    Words4 gain[2];  // the norm's weights for a thread's first chunks: constant, and so loaded before the wait

    DEVICE Stager(const GemvArgs& a, const GemvPlan& plan, char* shared) : a(a), plan(plan), shared(shared) {
        copy_init(arrival());
        __syncthreads();
        if (a.norm_weight)
            for (int i = 0; i < 2; ++i) gain[i] = load_chunk(a.norm_weight, (threadIdx.x + i * THREADS) * 8, a.k, plan.x_aligned);
    }
    DEVICE uint64_t* arrival() const { return reinterpret_cast<uint64_t*>(shared + plan.arrival_at); }
    DEVICE float* sums() const { return reinterpret_cast<float*>(shared + plan.sums_at); }
    DEVICE float* moments() const { return reinterpret_cast<float*>(shared + plan.arrival_at + 16); }  // [2][8][BANDS]
    DEVICE float* factors() const { return moments() + 16 * BANDS; }
    DEVICE Words4& chunk(int token, int c) const { return *reinterpret_cast<Words4*>(shared + token * plan.token_stride + c * 16); }

    // Stages `steps` steps of K, and zeros up to an even number, from step `first`; every thread calls it, and may read what it left when it returns.
    DEVICE void range(int first, int steps) {
        const int64_t from = int64_t(first) * F::KSTEP, left = a.k - from;
        const int wanted = (steps + 1) / 2 * 2 * 4 * F::SUB, here = int((left + 7) / 8 < wanted ? (left + 7) / 8 : wanted);
        for (int c = here + threadIdx.x; c < wanted; c += THREADS)
            for (int token = 0; token < a.m; ++token) chunk(token, c) = {0, 0, 0, 0};
        const char* x = static_cast<const char*>(a.x) + from * 2;
        if (plan.x_aligned) {
            copy_start({shared, plan.token_stride, x, a.x_stride * 2, int(a.m), here * 16}, arrival(), THREADS);
            copy_wait(arrival(), turn++);
        } else {
            for (int token = 0; token < a.m; ++token)
                for (int c = threadIdx.x; c < here; c += THREADS)
                    chunk(token, c) = load_chunk(x + token * a.x_stride * 2, int64_t(c) * 8, left, false);
        }
        __syncthreads();
        if (a.norm != NORM_NONE) statistics(here);
        if (a.norm == NORM_NONE && !F::SUMS) return;
        finish(from, wanted);
        __syncthreads();
    }

private:
    DEVICE float total(int power, int token) const {
        const float* m = moments() + (power * 8 + token) * BANDS;
        float sum = 0.f;
#pragma unroll
        for (int band = 0; band < BANDS; ++band) sum += m[band];
        return sum / static_cast<float>(a.k);
    }
    // Leaves, for each token and band, the sum of x (power 0, LayerNorm alone) and of (x - mean)^2 (power 1).
    DEVICE void statistics(int chunks) const {
#pragma unroll 1
        for (int power = a.norm == NORM_LAYER ? 0 : 1; power < 2; ++power) {
#pragma unroll 1
            for (int token = 0; token < a.m; ++token) {
                const float mean = power && a.norm == NORM_LAYER ? total(0, token) : 0.f;
                float sum = 0.f;
                for (int c = threadIdx.x; c < chunks; c += THREADS) {
                    float v[8];
                    unpack<T>(chunk(token, c), v);
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float d = c * 8 + e < a.k ? v[e] - mean : 0.f;
                        sum += power ? d * d : d;
                    }
                }
                sum = run_sum(sum, 32);
                if (threadIdx.x % 32 == 0) moments()[(power * 8 + token) * BANDS + threadIdx.x / 32] = sum;
            }
            __syncthreads();
        }
        // Each token's factor once, not once a chunk.
        for (int token = threadIdx.x; token < a.m; token += THREADS) factors()[token] = rsqrtf(total(1, token) + a.epsilon);
        __syncthreads();
    }
    DEVICE Words4 normalised(const Words4& raw, const Words4& g, const Words4& b, int token, int c) const {
        const float mean = a.norm == NORM_LAYER ? total(0, token) : 0.f, scale = factors()[token];
        const float plus = a.norm == NORM_RMS_PLUS_ONE || !a.norm_weight ? 1.f : 0.f;
        float v[8], gain[8], shift[8];
        unpack<T>(raw, v), unpack<T>(g, gain), unpack<T>(b, shift);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = c * 8 + e < a.k ? (v[e] - mean) * scale * (gain[e] + plus) + shift[e] : 0.f;
        return pack<T>(v);
    }
    // Norm in place, and the sums of each group of what the products will see. With a norm, all of K is staged at once.
    DEVICE void finish(int64_t from, int wanted) const {
        constexpr int WIDTH = F::SUMS ? 16 / (F::GROUPS ? F::GROUPS : 1) : 1;
        const int padded = (wanted + 31) / 32 * 32;
#pragma unroll 1
        for (int c = threadIdx.x, i = 0; c < padded; c += THREADS, ++i) {
            Words4 g = {0, 0, 0, 0}, b = {0, 0, 0, 0};
            if (a.norm != NORM_NONE && a.norm_weight) g = i == 0 ? gain[0] : i == 1 ? gain[1] : load_chunk(a.norm_weight, int64_t(c) * 8, a.k, plan.x_aligned);
            if (a.norm_bias) b = load_chunk(a.norm_bias, int64_t(c) * 8, a.k, plan.x_aligned);
#pragma unroll 1
            for (int token = 0; token < a.m; ++token) {
                Words4 v = {0, 0, 0, 0};
                if (c < wanted) {
                    v = chunk(token, c);
                    if (a.norm != NORM_NONE) chunk(token, c) = v = normalised(v, g, b, token, c);
                }
                if constexpr (F::SUMS) {
                    float x[8];
                    unpack<T>(v, x);
                    const float sum = run_sum(((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])), WIDTH);
                    if (c % WIDTH == 0 && c < wanted) sums()[c / WIDTH * 8 + token] = sum;
                }
            }
        }
    }
};
