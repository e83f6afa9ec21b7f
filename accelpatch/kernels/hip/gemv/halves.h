// Activations in fp16, for weights that are multiplied as fp16 (HALVES). Each block of 128 bf16 values along K is
// multiplied by a power of two that brings its largest magnitude to the top of fp16's range. Values within a factor of
// 2^32 of it are exact, and none is off by more than 2^-40 of it; infinity and NaN stay. Block exponents,
// [block][8 tokens], undo the factor in the sums.
//
// FloatStager or ClusterFloats stage the values; they are converted in place, into the order of the weights' pairs.
#pragma once
#include "stage.h"

template <class F, class T> struct Halves {
    static constexpr int BLOCK_CHUNKS = 16;  // of 8 values
    static constexpr uint32_t TOP = 142;     // the biased exponent of a block's largest magnitude afterwards, 2^15
    // The least biased exponent for which both the factor and the block exponent are normal floats.
    static constexpr uint32_t LEAST = TOP - 126;
    static constexpr bool NEEDED = T::BF16 || F::TILED;

    // The largest magnitude of a block, as bits. Precondition: all lanes that have its chunks call it.
    static DEVICE uint32_t most_of(const Words4& raw) {
        constexpr uint32_t MAGNITUDES = 0x7fff7fffu;
        uint32_t most = pair_max(
            pair_max(raw.x & MAGNITUDES, raw.y & MAGNITUDES), pair_max(raw.z & MAGNITUDES, raw.w & MAGNITUDES));
#pragma unroll
        for (int step = 1; step < BLOCK_CHUNKS; step *= 2) most = pair_max(most, lane_xor(most, step));
        return max(most & 0xffffu, most >> 16);
    }
    static DEVICE Words4 made_of(const Words4& raw, float times) {
        Words4 v = raw;
        if constexpr (T::BF16) {
            float values[8];
            unpack<T>(raw, values);
#pragma unroll
            for (float& value : values) value *= times;
            v = pack<F16>(values);
        }
        if constexpr (!F::TILED) return v;
        return {
            permute<0x5410>(v.x, v.z), permute<0x7632>(v.x, v.z), permute<0x5410>(v.y, v.w), permute<0x7632>(v.y, v.w)};
    }
    // Converts `chunks` chunks of each token, whole blocks, from chunk `first` on. Precondition: the values are staged,
    // a barrier has followed, and every thread of the block calls it. It ends with a barrier.
    static DEVICE void make(char* shared, const GemvPlan& plan, int tokens, int first, int chunks) {
        if constexpr (!NEEDED) return;
        float* exponents = reinterpret_cast<float*>(shared + plan.block_exponents_at);
        const int end = (chunks + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE;  // whole warps, for lane_xor
#pragma unroll 1
        for (int token = 0; token < tokens; ++token)
#pragma unroll 2
            for (int c = threadIdx.x; c < end; c += THREADS) {
                auto* at = reinterpret_cast<Words4*>(shared + token * plan.token_stride) + first + c;
                const Words4 raw = c < chunks ? *at : Words4{0, 0, 0, 0};
                uint32_t exponent = TOP;
                if constexpr (T::BF16) exponent = max(most_of(raw) >> 7, LEAST);
                if (c >= chunks) continue;
                *at = made_of(raw, bits_to_float((TOP + 127 - exponent) << 23));
                if (T::BF16 && c % BLOCK_CHUNKS == 0)
                    exponents[(first + c) / BLOCK_CHUNKS * 8 + token] = bits_to_float((exponent + 127 - TOP) << 23);
            }
        __syncthreads();
    }
};

template <class F, class T, bool COMMON> struct HalfStager : FloatStager<F, T, COMMON> {
    using Base = FloatStager<F, T, COMMON>;
    using Base::Base;
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, int before, const WAIT& wait, const REST& rest) {
        Base::range(from, steps, before, wait, rest);
        const int chunks = (steps + PAIR<F> - 1) / PAIR<F> * PAIR<F> * (F::KSTEP / 8);
        Halves<F, T>::make(Base::shared, Base::plan, int(Base::a.m), before * (F::KSTEP / 8), chunks);
    }
};
