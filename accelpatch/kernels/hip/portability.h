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

// ---- 16-bit floats, as their bits ----
struct Bf16 {
    static constexpr bool BF16 = true;
    static constexpr uint32_t NIBBLE_MAGIC = 0x43004300u;  // 128 + u for u in the low four mantissa bits
    static constexpr float NIBBLE_BASE = 128.f;
    static constexpr int NIBBLE_SHIFT = 0;
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
};

struct F16 {
    static constexpr bool BF16 = false;
    static constexpr uint32_t NIBBLE_MAGIC = 0x54005400u;  // 64 + u for u in mantissa bits 4 to 7
    static constexpr float NIBBLE_BASE = 64.f;
    static constexpr int NIBBLE_SHIFT = 4;
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
};

// ---- bytes and bits ----
DEVICE uint32_t low_halves(uint32_t a, uint32_t b) {  // (a.lo, b.lo)
#if ACCELPATCH_AMD
    return __builtin_amdgcn_perm(b, a, 0x05040100u);
#else
    return __byte_perm(a, b, 0x5410);
#endif
}
DEVICE uint32_t high_halves(uint32_t a, uint32_t b) {  // (a.hi, b.hi)
#if ACCELPATCH_AMD
    return __builtin_amdgcn_perm(b, a, 0x07060302u);
#else
    return __byte_perm(a, b, 0x7632);
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
// Two bytes of w into the low bytes of two halves: bytes 0 and 1, or 2 and 3.
template <int PAIR> DEVICE uint32_t spread_bytes(uint32_t w) {
#if ACCELPATCH_AMD
    return __builtin_amdgcn_perm(0u, w, PAIR ? 0x0c030c02u : 0x0c010c00u);
#else
    return __byte_perm(w, 0u, PAIR ? 0x4342 : 0x4140);
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

// ---- rows of activations into shared memory ----
// rows of `bytes` (a multiple of 16, both sides aligned) by all threads of the block; copy_wait() and a barrier follow.
// Hopper's copy engine keeps count of its own; waiting for it does not wait for the weights in flight.
struct RowCopy {
    char* into;
    int into_stride;
    const char* from;
    int64_t from_stride;
    int rows, bytes;
};
#if !ACCELPATCH_AMD && __CUDA_ARCH__ >= 900
DEVICE void copy_init(uint64_t* arrival) {
    if (threadIdx.x != 0) return;
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(arrival));
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void copy_start(const RowCopy& c, uint64_t* arrival, int) {
    if (threadIdx.x != 0) return;
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(arrival));
    asm volatile("fence.proxy.async;" ::: "memory");  // what the block read or wrote there before
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(c.rows * c.bytes) : "memory");
    for (int row = 0; row < c.rows; ++row) {
        const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(c.into + row * c.into_stride));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(c.from + row * c.from_stride), "r"(c.bytes), "r"(at) : "memory");
    }
}
DEVICE void copy_wait(uint64_t* arrival, int turn) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(arrival));
    uint32_t done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(turn & 1) : "memory");
}
#else
DEVICE void copy_init(uint64_t*) {}
DEVICE void copy_start(const RowCopy& c, uint64_t*, int threads) {
    for (int row = 0; row < c.rows; ++row) {
#pragma unroll 4
        for (int at = threadIdx.x * 16; at < c.bytes; at += threads * 16) {
            const char* from = c.from + row * c.from_stride + at;
            char* to = c.into + row * c.into_stride + at;
#if ACCELPATCH_AMD
            *reinterpret_cast<Words4*>(to) = *reinterpret_cast<const Words4*>(from);
#else
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#endif
        }
    }
}
DEVICE void copy_wait(uint64_t*, int) {
#if !ACCELPATCH_AMD
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif

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
DEVICE void prefetch_l2(const void* address) {
#if !ACCELPATCH_AMD
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
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

// Waves that share a tile's K, and tiles a block: 4 by 2 measured best on an H200 for int8 and int4, 8 by 1 for bf16.
#ifndef ACCELPATCH_WK
#define ACCELPATCH_WK 4
#define ACCELPATCH_WN 2
#endif
