// One source for AMD and NVIDIA: what differs has the same names in amd.h and nvidia.h. Compiled by hipcc or clang for
// gfx90a, gfx942 and gfx950, and by nvcc for sm_80 and later. It includes no header of torch.
#pragma once
#include <cstdint>
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#else
#include <cuda_runtime.h>
#endif

#define DEVICE __device__ __forceinline__
#define ALWAYS_INLINE __attribute__((always_inline))  // for lambdas

struct alignas(16) Words4 {  // unaligned, shared memory would be accessed word by word
    uint32_t x, y, z, w;
};

DEVICE uint32_t word_of(const Words4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

#if defined(__HIP__)
#include "amd.h"
#define RARELY(x) (x)
#else
#include "nvidia.h"
// The compiler places the code of such a branch elsewhere: in line, instructions that are jumped over would delay those
// after them.
#define RARELY(x) __builtin_expect(!!(x), 0)
#endif

// Counts a call in `number`, and returns whether it is the last of `of` calls; `number` is then zero again.
DEVICE bool last_call(int32_t* number, int of) { return next_number(number, of) == of - 1; }

constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE;  // of a block of most kernels

DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEVICE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// The sum over aligned groups of `width` neighbouring lanes (a power of two up to 32), in a fixed order. Every lane
// gets that of its group. Precondition: all lanes of the warp call it.
template <class V> DEVICE V run_sum(V value, int width) {
    for (int step = 1; step < width; step *= 2) value += lane_xor(value, step);
    return value;
}

// ---- 16-bit floats, as bits ----
// The bits of an output that is not stored yet. NVIDIA's conversions never give them: their NaN is 0x7fff.
constexpr uint32_t SENTINEL = 0xffff;
// Whether any of eight 16-bit values is SENTINEL.
DEVICE bool is_sentinel(const Words4& v) {
    const uint32_t most = pair_max(pair_max(v.x, v.y), pair_max(v.z, v.w));
    return most >= SENTINEL << 16 || (most & 0xffffu) == SENTINEL;
}
// A dtype of activations. up: to float32, up_high: the upper one of a pair; down: to 16 bits, rounded.
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

// Eight 16-bit values to float32, and back.
template <class T> DEVICE void unpack(const Words4& v, float* out) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = T::up(w[i] & 0xffffu), out[2 * i + 1] = T::up_high(w[i]);
}
template <class T> DEVICE Words4 pack(const float* v) {
    return {T::down_pair(v[0], v[1]), T::down_pair(v[2], v[3]), T::down_pair(v[4], v[5]), T::down_pair(v[6], v[7])};
}
// Loads COUNT floats at once. Precondition: `from` is aligned to all of them, COUNT a power of two.
template <int COUNT> DEVICE void load_floats(float* out, const float* from) {
    struct alignas(4 * COUNT) All {
        float v[COUNT];
    };
    const All all = *reinterpret_cast<const All*>(from);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out[i] = all.v[i];
}
