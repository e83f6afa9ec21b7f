// NVIDIA, sm_80 and later: warps of 32, m16n8 matrix products, a multi-stage buffer in shared memory, dependent launch
// (Hopper on).
#pragma once

using GpuStream = cudaStream_t;
constexpr int WARP_SIZE = 32;
constexpr int BLOCKS_RESIDENT = 2;       // of a kernel on an SM: this one and its successor
constexpr bool SHARED_STAGES = true;     // or else one stage ahead, in registers
constexpr bool BLOCKS_MEET = true;       // blocks of a launch that all find place at once may wait for each other
constexpr bool LAUNCHES_OVERLAP = true;  // a kernel may begin before the one before it has ended
constexpr int RESERVED_SHARED = 1024;    // bytes of a block that are the system's

DEVICE int lane_id() { return threadIdx.x & 31; }
template <class V> DEVICE V lane_xor(V value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE int lowest_bit(uint32_t bits) { return __ffs(int(bits)) - 1; }
DEVICE uint32_t lane_vote(bool yes) { return __ballot_sync(0xffffffffu, yes); }  // of the first 32 lanes

// ---- conversions and bits ----
DEVICE uint32_t float_to_bf16(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE uint32_t floats_to_bf16(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
DEVICE float half_to_float(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
}
DEVICE uint32_t float_to_half(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE uint32_t floats_to_half(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
// Whether the hardware has 8-bit floats of this form (e4m3.h): Ada on, and OCP's.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
template <bool> constexpr bool E4M3_HERE = false;
#else
template <bool FNUZ> constexpr bool E4M3_HERE = !FNUZ;
#endif
DEVICE uint32_t floats_to_e4m3(float a, float b, float c, float d) {  // saturated
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | uint32_t(high) << 16;
}
DEVICE void e4m3_to_halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
    // The upper two are so taken from where they lie; a shift would be an instruction of its own.
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
}
DEVICE float rounded_multiply(float a, float b) { return __fmul_rn(a, b); }  // never part of a fused one
DEVICE float fast_exp2(float v) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
    return y;
}
DEVICE float fast_reciprocal(float v) {  // within a unit in the last place
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
    return y;
}
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {  // of fp16
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }  // of two halves each, unsigned
// Of a word, and more.
template <bool SIGNED> DEVICE int sum_of_bytes(uint32_t bytes, int more) {
    return SIGNED ? __dp4a(int(bytes), 0x01010101, more) : int(__dp4a(bytes, 0x01010101u, uint32_t(more)));
}
DEVICE uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t bits) {  // in one instruction
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}
DEVICE uint32_t transposed(uint32_t v) {  // of 8 by 8 halves, a pair a lane
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}
// Whether any thread of the block says yes; all of them call it, and it is a barrier. Others do it by a word of shared
// memory.
DEVICE bool block_any(bool yes, uint32_t&) { return __syncthreads_or(yes); }
// Worked out by here, however late it is used.
DEVICE void compute_here(int& v) { asm volatile("" : "+r"(v)); }
DEVICE void compute_here(const char*& v) { asm volatile("" : "+l"(v)); }
// Four bytes of a (0 to 3) and b (4 to 7), one in each nibble of SELECT, the lowest first.
template <uint32_t SELECT> DEVICE uint32_t permute(uint32_t a, uint32_t b) { return __byte_perm(a, b, SELECT); }
// The eight nibbles of a word as places in a table of 16 bytes a, b, c, d, none of them negative: the bytes at the
// first four, or at the last; apart those of a and b, and those of c and d, each with 0 for the others.
constexpr bool BOOK_IN_HALVES = true;
struct NibbleLookup {
    uint32_t word, others;
    DEVICE explicit NibbleLookup(uint32_t word) : word(word), others(word ^ 0x88888888u) {}
    static constexpr DEVICE int order(int e) { return e < 4 ? 2 * e : 2 * e - 7; }  // of a tile's values in the bytes
    // A nibble with its top bit gives the sign of its byte, eight times.
    static DEVICE uint32_t select(uint32_t a, uint32_t b, uint32_t nibbles) {
        uint32_t out;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(nibbles));
        return out;
    }
    DEVICE void operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int half, uint32_t* out) const {
        out[0] = select(a, b, half ? word >> 16 : word), out[1] = select(c, d, half ? others >> 16 : others);
    }
};

#include "nvidia_memory.h"
#include "nvidia_sync.h"
#include "nvidia_cluster.h"

// ---- matrix products ----
// 16 rows by 16 of K, times 16 by 8 columns.
template <class T>
DEVICE void multiply_halves(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (T::BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
// 16 rows by 32 of K, signed bytes, times 32 by 8 columns of bytes that have a sign or not.
constexpr bool UNSIGNED_BYTES = true;
DEVICE void multiply_bytes(
    int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, bool sign) {
    if (sign)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 16 rows by 16 of K, signed bytes, times 16 by 8 columns of bytes without a sign.
DEVICE void multiply_bytes(int* c, uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
// Four matrices of 8 by 8 halves, transposed on their way from shared memory: a row of eight a lane.
DEVICE void load_transposed(uint32_t* v, const Words4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
        : "r"(shared_address(row))
        : "memory");
}
#include "nvidia_mma.h"
#include "nvidia_attention.h"

#include "nvidia_host.h"
