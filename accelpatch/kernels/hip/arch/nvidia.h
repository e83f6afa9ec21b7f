// NVIDIA, sm_80 and later: warps of 32, m16n8 matrix instructions, a multi-stage buffer in shared memory, programmatic
// dependent launch (from Hopper on).
#pragma once

using GpuStream = cudaStream_t;
constexpr int WARP_SIZE = 32;
constexpr int BLOCKS_RESIDENT = 2;       // blocks that an SM has room for: one of a kernel and one of the next
constexpr bool SHARED_STAGES = true;     // weights are copied to shared memory; else to registers, one stage ahead
constexpr bool BLOCKS_MEET = true;       // blocks of a launch may wait for each other, where all of them run at once
constexpr bool LAUNCHES_OVERLAP = true;  // a kernel may begin before the one before it has ended
constexpr int RESERVED_SHARED = 1024;    // bytes of a block's shared memory that the driver reserves

DEVICE int lane_id() { return threadIdx.x & 31; }
template <class V> DEVICE V lane_xor(V value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE int lowest_bit(uint32_t bits) { return __ffs(int(bits)) - 1; }
DEVICE uint32_t lane_vote(bool yes) { return __ballot_sync(0xffffffffu, yes); }  // a bit for each of 32 lanes

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
// Whether the hardware converts 8-bit floats of this form (e4m3.h): from Ada on those of OCP, never FNUZ.
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
// Four e4m3 as fp16: the lower two bytes in `low`, the upper two in `high`.
DEVICE void e4m3_to_halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
    // The mov gives both halves of the register; a shift would be an instruction of its own.
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
}
DEVICE float rounded_multiply(float a, float b) { return __fmul_rn(a, b); }  // never contracted to an fma
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
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {  // a * b + c of fp16 pairs
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }  // of pairs of unsigned 16-bit integers
// The sum of a word's four bytes, signed or not, plus `more`.
template <bool SIGNED> DEVICE int sum_of_bytes(uint32_t bytes, int more) {
    return SIGNED ? __dp4a(int(bytes), 0x01010101, more) : int(__dp4a(bytes, 0x01010101u, uint32_t(more)));
}
DEVICE uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t bits) {  // (a & mask) ^ bits in one instruction
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}
// Transposes a matrix of 8 by 8 halves, of which lane l has columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
DEVICE uint32_t transposed(uint32_t v) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}
// Whether any thread of the block passes `yes`. Precondition: all threads of the block call it. It is a barrier. The
// second argument is a word of shared memory, which AMD's form needs.
DEVICE bool block_any(bool yes, uint32_t&) { return __syncthreads_or(yes); }
// Makes the compiler compute v at this point: not later, and what follows from v not earlier.
DEVICE void compute_here(int& v) { asm volatile("" : "+r"(v)); }
DEVICE void compute_here(const char*& v) { asm volatile("" : "+l"(v)); }
// Four of the bytes of a (0 to 3) and b (4 to 7). Each nibble of SELECT chooses one, the lowest nibble the lowest byte.
template <uint32_t SELECT> DEVICE uint32_t permute(uint32_t a, uint32_t b) { return __byte_perm(a, b, SELECT); }
// Looks up the nibbles of a word in a table of 16 bytes a, b, c, d (a has entries 0 to 3), none of them negative. half:
// 0 for the four low nibbles, 1 for the four high ones. out[0] has the entries of a and b, and 0 for nibbles from 8 on;
// out[1] has those of c and d, and 0 for nibbles below 8.
constexpr bool BOOK_IN_HALVES = true;
struct NibbleLookup {
    uint32_t word, inverted;
    DEVICE explicit NibbleLookup(uint32_t word) : word(word), inverted(word ^ 0x88888888u) {}
    // Which of the eight values of a tile's word is in byte e of the results, those of half 0 first.
    static constexpr DEVICE int order(int e) { return e < 4 ? 2 * e : 2 * e - 7; }
    // prmt: a nibble with its top bit set gives the sign of the byte, eight times, which is 0 here.
    static DEVICE uint32_t select(uint32_t a, uint32_t b, uint32_t nibbles) {
        uint32_t out;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(nibbles));
        return out;
    }
    DEVICE void operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int half, uint32_t* out) const {
        out[0] = select(a, b, half ? word >> 16 : word), out[1] = select(c, d, half ? inverted >> 16 : inverted);
    }
};

#include "nvidia_memory.h"
#include "nvidia_sync.h"
#include "nvidia_cluster.h"

// ---- matrix instructions ----
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
// 16 rows by 32 of K, signed bytes, times 32 by 8 columns of bytes that are signed (`sign`) or unsigned.
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
// 16 rows by 16 of K, signed bytes, times 16 by 8 columns of unsigned bytes.
DEVICE void multiply_bytes(int* c, uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
// Loads four matrices of 8 by 8 halves from shared memory, transposed. Each lane passes the address of a row of eight.
DEVICE void load_transposed(uint32_t* v, const Words4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
        : "r"(shared_address(row))
        : "memory");
}
#include "nvidia_mma.h"
#include "nvidia_attention.h"

#include "nvidia_host.h"
