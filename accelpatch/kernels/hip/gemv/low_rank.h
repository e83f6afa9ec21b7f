// LoRA inside a product: y[M, N] = epilogue(x w^T + bias + (x down^T) up^T). Sources that define LOW_RANK have it.
//
// down[ranks][K] is a few rows: a block multiplies one of them with the activations as soon as it has staged its own,
// and stores the sums where all blocks of the launch look for them when they have their first tile of y. By then they
// have long been there, so that no launch is added. low[ranks][8 tokens] has all bits set before and after: the last
// block to have read it sets them again. Where blocks do not wait for each other, a launch before makes the sums.
#pragma once
#include "norm.h"

constexpr int LOW_TOKENS = 8;    // of a rank: 32 bytes
constexpr int MOST_RANKS = 512;  // their sums lie in shared memory
constexpr uint32_t NO_LOW = 0xffffffffu;

DEVICE int64_t low_words(const GemvArgs& a) { return int64_t(a.ranks) * LOW_TOKENS; }
// In shared memory: all sums, and behind them what the threads add up.
DEVICE float* low_here(const GemvPlan& plan, char* shared) { return reinterpret_cast<float*>(shared + plan.low_at); }

// Lines of the rows that this block will multiply, into L2: they are constant, and so come before the wait.
DEVICE void prefetch_down(const GemvArgs& a, int block, int blocks) {
    for (int r = block; r < a.ranks; r += blocks) {
        const char* row = static_cast<const char*>(a.down) + int64_t(r) * a.k * 2;
        for (int64_t at = int64_t(threadIdx.x) * 128; at < a.k * 2; at += int64_t(THREADS) * 128)
            prefetch_line(row + at);
    }
}
// The rows `block`, `block` + `blocks` and so on, times all tokens; every thread of the block calls it, and none has
// anything to do with `scratch`, floats[8][THREADS / 32]. The norms' moments are there.
template <class T, class NORMS>
DEVICE void multiply_down(const GemvArgs& a, const NORMS& norms, float* scratch, int block, int blocks) {
    constexpr int BANDS = THREADS / 32;
    const int k = int(a.k);
#pragma unroll 1
    for (int r = block; r < a.ranks; r += blocks) {
        const char* row = static_cast<const char*>(a.down) + int64_t(r) * a.k * 2;
#pragma unroll 1
        for (int token = 0; token < int(a.m); ++token) {
            const float mean = a.norm ? norms.mean(token) : 0.f, scale = a.norm ? norms.scale(token) : 0.f;
            float sum = 0.f;
#pragma unroll 2
            for (int at = threadIdx.x * 8; at < k; at += THREADS * 8) {
                Words4 x = norms.load(token, at);
                if (a.norm) x = norms.apply(x, norms.weight(at), at, mean, scale);
                float v[8], w[8];
                unpack<T>(x, v), unpack<T>(load_chunk(row, at, k, k % 8 == 0), w);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum = fmaf(v[e], w[e], sum);
            }
            sum = run_sum(sum, 32);
            if (threadIdx.x % 32 == 0) scratch[token * BANDS + threadIdx.x / 32] = sum;
        }
        __syncthreads();
        if (threadIdx.x < LOW_TOKENS / 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = threadIdx.x * 4 + i;
                float sum = 0.f;
                for (int band = 0; band < (token < int(a.m) ? BANDS : 0); ++band) sum += scratch[token * BANDS + band];
                words[i] = sum == sum ? float_to_bits(sum) : 0x7fc00000u;  // never NO_LOW
            }
            store_relaxed16(a.low + r * LOW_TOKENS + threadIdx.x * 4, {words[0], words[1], words[2], words[3]});
        }
        __syncthreads();
    }
}
// Brings all sums into shared memory; every lane of a warp calls it. Warps that do so leave the same words.
DEVICE void collect_low(const GemvArgs& a, float* here) {
    if constexpr (!BLOCKS_MEET) return;
#pragma unroll 1
    for (int at = lane_id() * 4; at < int(low_words(a)); at += WARP_SIZE * 4) {
        Words4 v = load_relaxed16(a.low + at);
        const auto missing = [&]() ALWAYS_INLINE {
            return v.x == NO_LOW || v.y == NO_LOW || v.z == NO_LOW || v.w == NO_LOW;
        };
        for (int looks = 0; missing(); v = load_relaxed16(a.low + at)) spin(looks);
        *reinterpret_cast<Words4*>(here + at) = v;
    }
    warp_sync();
}
// What the adapters add to a token's output of row n of w.
template <class T> DEVICE float low_rank_sum(const GemvArgs& a, const float* here, int token, int n) {
    const int part = (n >= a.second_part) + (n >= a.third_part);
    const float* low = (BLOCKS_MEET ? here : a.low) + part * a.rank * LOW_TOKENS + token;
    const uint16_t* up = static_cast<const uint16_t*>(a.up) + int64_t(n) * a.rank;
    float sum = 0.f;
#pragma unroll 2
    for (int r = 0; r < a.rank; r += 8) {
        float w[8];
        unpack<T>(load_activation16(up + r), w);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(w[e], low[(r + e) * LOW_TOKENS], sum);
    }
    return sum;
}
// Behind a barrier after which no thread of the block reads `low`: the last block sets all of its bits.
DEVICE void reset_low(const GemvArgs& a) {
    if constexpr (BLOCKS_MEET) {
        if (threadIdx.x != 0 || !last_call(reinterpret_cast<int32_t*>(a.low + low_words(a)), int(gridDim.x))) return;
#pragma unroll 1
        for (int at = 0; at < int(low_words(a)); at += 4) store_relaxed16(a.low + at, {NO_LOW, NO_LOW, NO_LOW, NO_LOW});
    }
}

// A block's part in it, as gemv_kernel.h goes along. `here`: in shared memory, see low_here().
template <class T> struct Adapters {
    const GemvArgs& a;
    float* const here;
    const int blocks;  // those with tiles
    bool multiplied = false, collected = false;
    DEVICE Adapters(const GemvArgs& a, const GemvPlan& plan, float* here)
        : a(a),
          here(here),
          blocks(min(int(gridDim.x), plan.tiles)) {
        prefetch_down(a, int(blockIdx.x), blocks);
    }
    // The block's rows of `down`, once; every thread calls it when activations have been staged.
    template <class NORMS> DEVICE void multiply(const NORMS& norms) {
        if (BLOCKS_MEET && !multiplied) multiply_down<T>(a, norms, here + low_words(a), int(blockIdx.x), blocks);
        multiplied = true;
    }
    // Every lane of a warp calls it before outputs.
    DEVICE const float* sums() {
        if (!collected) collect_low(a, here);
        collected = true;
        return here;
    }
    // Every thread calls it when it has no output left.
    DEVICE void end() const {
        __syncthreads();
        reset_low(a);
    }
};

// Where blocks do not wait for each other: the sums, by a launch before. A block has its norms' moments alone.
template <class T> __global__ void __launch_bounds__(THREADS) low_rank_kernel(const GemvArgs a, const GemvPlan plan) {
    extern __shared__ __align__(128) char shared[];
    using Moments = Norms<T, false, false>;
    const Moments norms(a, plan, shared);
    if (a.norm != NORM_NONE) {
        for (int pass = norms.layer() ? 0 : 1; pass < 2; ++pass) {
            for (int token = 0; token < int(a.m); ++token) {
                const float mean = pass ? norms.mean(token) : 0.f;
                float partial = 0.f;
                for (int at = threadIdx.x * 8; at < int(a.k); at += THREADS * 8) {
                    const Words4 x = norms.load(token, at);
                    partial += pass ? norms.squares_of(x, at, mean) : Moments::sum_of(x);
                }
                Moments::leave(pass ? norms.squares() : norms.sums(), token, partial);
            }
            __syncthreads();
        }
    }
    multiply_down<T>(a, norms, low_here(plan, shared), int(blockIdx.x), int(gridDim.x));
}
