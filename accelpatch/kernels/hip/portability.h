// The one place that knows an architecture: wave size, matrix fragments, streaming loads, dependent launch.
// Compiled by hipcc or clang for gfx90a, gfx942, gfx950, and by nvcc for sm_80 and later. No torch header.
#pragma once
#include <cstdint>

#if defined(__HIP__)
#define ACCELPATCH_AMD 1
#include <hip/hip_runtime.h>
using GpuStream = hipStream_t;
#else
#define ACCELPATCH_AMD 0
#include <cuda_runtime.h>
using GpuStream = cudaStream_t;
#endif

#if ACCELPATCH_AMD
constexpr int WAVE = 64;
using Half2 = _Float16 __attribute__((ext_vector_type(2)));
#define ACCELPATCH_MMA_MIN_BLOCKS 1
#else
constexpr int WAVE = 32;
#define ACCELPATCH_MMA_MIN_BLOCKS 2
#endif

#define DEVICE __device__ __forceinline__

struct alignas(16) Words4 {  // aligned, or shared memory is read word by word
    uint32_t x, y, z, w;
};

DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEVICE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// Sum over aligned runs of `width` lanes (a power of two up to 32), in a fixed order; every lane gets it.
DEVICE float run_sum(float value, int width) {
    for (int step = 1; step < width; step *= 2) {
#if ACCELPATCH_AMD
        value += __shfl_xor(value, step, WAVE);
#else
        value += __shfl_xor_sync(0xffffffffu, value, step);
#endif
    }
    return value;
}

// The largest over aligned runs of 32 lanes; every lane gets it.
DEVICE uint32_t run_max(uint32_t value) {
#if ACCELPATCH_AMD
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_xor(value, step, WAVE);
        value = other > value ? other : value;
    }
    return value;
#else
    return __reduce_max_sync(0xffffffffu, value);
#endif
}
DEVICE uint32_t run_or(uint32_t value) {  // likewise
#if ACCELPATCH_AMD
    for (int step = 1; step < 32; step *= 2) value |= __shfl_xor(value, step, WAVE);
    return value;
#else
    return __reduce_or_sync(0xffffffffu, value);
#endif
}
DEVICE float from_lane(float value, int lane) {
#if ACCELPATCH_AMD
    return __shfl(value, lane, WAVE);
#else
    return __shfl_sync(0xffffffffu, value, lane);
#endif
}

// ---- 16-bit floats, as their bits ----
struct Bf16 {
    static constexpr bool BF16 = true;
    static DEVICE float up(uint32_t bits) { return bits_to_float(bits << 16); }
    static DEVICE float up_high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
    static DEVICE uint32_t down(float value) {
#if ACCELPATCH_AMD
        const uint32_t bits = float_to_bits(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
        return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#else
        uint16_t bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
#endif
    }
    static DEVICE uint32_t down_pair(float low, float high) {
#if ACCELPATCH_AMD
        return down(low) | down(high) << 16;
#else
        uint32_t bits;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
#endif
    }
};

struct F16 {
    static constexpr bool BF16 = false;
    static DEVICE float up(uint32_t bits) {
#if ACCELPATCH_AMD
        return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(bits)));
#else
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
        return value;
#endif
    }
    static DEVICE float up_high(uint32_t pair) { return up(pair >> 16); }
    static DEVICE uint32_t down(float value) {
#if ACCELPATCH_AMD
        return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
#else
        uint16_t bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
#endif
    }
    static DEVICE uint32_t down_pair(float low, float high) {
#if ACCELPATCH_AMD
        return down(low) | down(high) << 16;
#else
        uint32_t bits;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
#endif
    }
};

// ---- pairs of fp16, as their bits ----
DEVICE uint32_t pair_subtract(uint32_t a, uint32_t b) {
#if ACCELPATCH_AMD
    return __builtin_bit_cast(uint32_t, __builtin_bit_cast(Half2, a) - __builtin_bit_cast(Half2, b));
#else
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#endif
}
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
#if ACCELPATCH_AMD
    return __builtin_bit_cast(uint32_t, __builtin_elementwise_fma(__builtin_bit_cast(Half2, a), __builtin_bit_cast(Half2, b), __builtin_bit_cast(Half2, c)));
#else
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#endif
}

// ---- bytes and bits ----
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) {  // of two halves each, unsigned
#if ACCELPATCH_AMD
    using Pair = uint16_t __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32_t, __builtin_elementwise_max(__builtin_bit_cast(Pair, a), __builtin_bit_cast(Pair, b)));
#else
    return __vmaxu2(a, b);
#endif
}
// (a & mask) | magic, in one instruction.
DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t magic) {
#if ACCELPATCH_AMD
    return (a & mask) | magic;
#else
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
    return d;
#endif
}
// Keeps a value in its register: the compiler may not compute it anew in a loop.
DEVICE int pinned(int v) {
#if !ACCELPATCH_AMD
    asm volatile("" : "+r"(v));
#endif
    return v;
}
// Two bytes of w as the low bytes of two halves: bytes 0 and 1, or 2 and 3; the high bytes from `high`.
template <int PAIR> DEVICE uint32_t bytes_below(uint32_t w, uint32_t high) {
#if ACCELPATCH_AMD
    return __builtin_amdgcn_perm(high, w, PAIR ? 0x04030402u : 0x04010400u);
#else
    return __byte_perm(w, high, PAIR ? 0x4342 : 0x4140);
#endif
}

// ---- loads of what another kernel may just have written: through L2, never a stale L1 line ----
DEVICE Words4 load_activation16(const void* source) {
#if ACCELPATCH_AMD
    return *static_cast<const Words4*>(source);
#else
    Words4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(source) : "memory");
    return v;
#endif
}
DEVICE uint32_t load_activation2(const void* source) {
#if ACCELPATCH_AMD
    return *static_cast<const uint16_t*>(source);
#else
    uint16_t v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(source) : "memory");
    return v;
#endif
}

// ---- programmatic dependent launch (Hopper and later); nothing elsewhere ----
DEVICE void grid_release() {
#if !ACCELPATCH_AMD && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void grid_wait() {
#if !ACCELPATCH_AMD && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Barrier among `threads` threads that share `name`; on AMD the whole workgroup (its waves run in step anyway).
DEVICE void group_barrier(int name, int threads) {
#if ACCELPATCH_AMD
    __syncthreads();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(name + 1), "r"(threads) : "memory");
#endif
}
