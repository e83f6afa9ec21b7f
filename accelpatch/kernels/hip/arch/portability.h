// One source for AMD and NVIDIA: what differs between them has one name in both headers. Compiled by hipcc or clang for
// gfx90a, gfx942, gfx950, and by nvcc for sm_80 and later. No torch header.
#pragma once
#include <cstdint>
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#else
#include <cuda_runtime.h>
#endif

#define DEVICE __device__ __forceinline__
#define ALWAYS_INLINE __attribute__((always_inline))  // of a lambda

struct alignas(16) Words4 {  // aligned, or shared memory is read word by word
    uint32_t x, y, z, w;
};

DEVICE uint32_t word_of(const Words4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

#if defined(__HIP__)
#include "amd.h"
#define RARELY(x) (x)
#else
#include "nvidia.h"
// What it leads to is laid elsewhere: jumped over, it would delay what comes behind it.
#define RARELY(x) __builtin_expect(!!(x), 0)
#endif

// Whether this is the last of `of` calls; the number is then zero again.
DEVICE bool last_call(int32_t* number, int of) { return next_number(number, of) == of - 1; }

constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE;  // of a block

DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEVICE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// Sum over aligned runs of `width` lanes (a power of two up to 32), in a fixed order; every lane gets it.
template <class V> DEVICE V run_sum(V value, int width) {
    for (int step = 1; step < width; step *= 2) value += lane_xor(value, step);
    return value;
}

// ---- 16-bit floats, as their bits ----
constexpr uint32_t SENTINEL = 0xffff;       // of a word that is yet to come: NVIDIA's conversions give NaN as 0x7fff
DEVICE bool is_sentinel(const Words4& v) {  // any of eight
    const uint32_t most = pair_max(pair_max(v.x, v.y), pair_max(v.z, v.w));
    return most >= SENTINEL << 16 || (most & 0xffffu) == SENTINEL;
}
struct Bf16 {
    static constexpr bool BF16 = true;
    static DEVICE float up(uint32_t bits) { return bits_to_float(bits << 16); }
    static DEVICE float up_high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
    static DEVICE uint32_t down(float value) { return float_to_bf16(value); }
    static DEVICE uint32_t down_pair(float low, float high) { return floats_to_bf16(low, high); }
};
struct F16 {
    static constexpr bool BF16 = false;
    static DEVICE float up(uint32_t bits) { return half_to_float(bits); }
    static DEVICE float up_high(uint32_t pair) { return half_to_float(pair >> 16); }
    static DEVICE uint32_t down(float value) { return float_to_half(value); }
    static DEVICE uint32_t down_pair(float low, float high) { return floats_to_half(low, high); }
};

template <class T> DEVICE void unpack(const Words4& v, float* out) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = T::up(w[i] & 0xffffu), out[2 * i + 1] = T::up_high(w[i]);
}
template <class T> DEVICE Words4 pack(const float* v) {
    return {T::down_pair(v[0], v[1]), T::down_pair(v[2], v[3]), T::down_pair(v[4], v[5]), T::down_pair(v[6], v[7])};
}
template <int COUNT> DEVICE void load_floats(float* out, const float* from) {
    struct alignas(4 * COUNT) All {
        float v[COUNT];
    };
    const All all = *reinterpret_cast<const All*>(from);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out[i] = all.v[i];
}
