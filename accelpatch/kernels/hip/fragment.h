// Matrix fragments: 16 rows of weights by 8 tokens. A lane holds 16 bytes a row and step, whatever the format:
// K is permuted alike in both operands, so the instruction's own order of K never matters.
#pragma once
#include "portability.h"

// 8 tokens' worth of accumulators for this lane, and which row and token each one is.
#if ACCELPATCH_AMD
using Float4 = float __attribute__((ext_vector_type(4)));
using Short4 = short __attribute__((ext_vector_type(4)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
DEVICE int lane_id() { return threadIdx.x % WAVE; }
constexpr int ROWS_PER_LANE = 1;
DEVICE int fragment_row(int) { return lane_id() & 15; }
DEVICE int fragment_half(int) { return (lane_id() >> 3) & 1; }  // whether that row is one of the tile's last 8
DEVICE int fragment_quarter() { return lane_id() >> 4; }  // which 16 bytes of a row's 64-byte step

template <class T> struct MatrixFragment {
    static constexpr int TOKENS = 1;     // different tokens a lane adds up, neighbours
    static constexpr int SIZE = 4;       // accumulators a lane
    static constexpr int SCALE_ROWS = 4; // consecutive row pairs (r, r + 8) whose scales a lane needs
    float sum[SIZE];
    DEVICE void zero() { for (float& v : sum) v = 0.f; }
    static DEVICE int token(int) { return lane_id() & 15; }
    static DEVICE bool owns(int) { return (lane_id() & 15) < 8; }
    static DEVICE float sum_share() { return 1.f; }
    static DEVICE int row(int i) { return 4 * (lane_id() >> 4) + i; }
    static DEVICE int scale_pair() { return 4 * ((lane_id() >> 4) & 1); }
    static constexpr int SCALES = 4;     // different rows a lane adds up
    static DEVICE int scale_of(int i) { return i; }
    static DEVICE int scale_word(int j, int groups, int group) { return j * groups + group; }
    static DEVICE int scale_half(int) { return lane_id() >> 5; }
    static constexpr bool OWN_ROWS = false;  // whether the rows a lane adds up are those it holds weights of
    DEVICE void gather() {}
    DEVICE void finish() {}
    // The token whose activations this lane reads; columns past the last token repeat it and are never stored.
    static DEVICE int column(int tokens) { return (lane_id() & 7) < tokens ? lane_id() & 7 : tokens - 1; }
    DEVICE void add(const Words4* a, const char* chunk, int, int) {
        const Words4 b = *reinterpret_cast<const Words4*>(chunk);
        multiply(a[0].x, a[0].y, b.x, b.y);
        multiply(a[0].z, a[0].w, b.z, b.w);
    }
    DEVICE void multiply(uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
        const uint64_t a = a0 | (uint64_t(a1) << 32), b = b0 | (uint64_t(b1) << 32);
        Float4 c = {sum[0], sum[1], sum[2], sum[3]};
        if constexpr (T::BF16) {
            c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4, a), __builtin_bit_cast(Short4, b), c, 0, 0, 0);
        } else {
            c = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, a), __builtin_bit_cast(Half4, b), c, 0, 0, 0);
        }
        for (int i = 0; i < 4; ++i) sum[i] = c[i];
    }
};

// gfx90a's f16 matrix instructions flush subnormals; mixed multiply-add does not. A lane holds a quarter of a row's
// products with each token; finish() adds the quarters.
struct MixedFragment {
    static constexpr int TOKENS = 8;
    static constexpr int SIZE = 8;
    static constexpr int SCALE_ROWS = 1;
    float sum[SIZE];
    DEVICE void zero() { for (float& v : sum) v = 0.f; }
    static DEVICE int token(int i) { return i; }
    static DEVICE bool owns(int) { return lane_id() < 16; }
    static DEVICE float sum_share() { return lane_id() < 16 ? 1.f : 0.f; }
    static DEVICE int row(int) { return lane_id() & 15; }
    static DEVICE int scale_pair() { return lane_id() & 7; }
    static constexpr int SCALES = 1;
    static DEVICE int scale_of(int) { return 0; }
    static DEVICE int scale_word(int, int, int group) { return group; }
    static DEVICE int scale_half(int) { return (lane_id() >> 3) & 1; }
    static constexpr bool OWN_ROWS = true;
    static DEVICE int column(int) { return 0; }
    DEVICE void gather() {}
    DEVICE void finish() {
        for (float& v : sum) {
            v += __shfl_xor(v, 16, WAVE);
            v += __shfl_xor(v, 32, WAVE);
        }
    }
    DEVICE void add(const Words4* a, const char* chunk, int stride, int tokens) {
        const uint32_t w[4] = {a[0].x, a[0].y, a[0].z, a[0].w};
#pragma unroll
        for (int token = 0; token < SIZE; ++token) {
            if (token >= tokens) continue;
            const Words4 b = *reinterpret_cast<const Words4*>(chunk + token * stride);
            const uint32_t x[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Half2 p = __builtin_bit_cast(Half2, w[i]), q = __builtin_bit_cast(Half2, x[i]);
                sum[token] = __builtin_fmaf(float(p[0]), float(q[0]), sum[token]);
                sum[token] = __builtin_fmaf(float(p[1]), float(q[1]), sum[token]);
            }
        }
    }
};
template <class OPERAND, class T> struct FragmentOf { using Type = MatrixFragment<OPERAND>; };
#if defined(__gfx90a__)
template <> struct FragmentOf<F16, F16> { using Type = MixedFragment; };  // staged bf16 has no subnormals worth keeping
#endif

#else  // NVIDIA: mma.m16n8k16
DEVICE int lane_id() { return threadIdx.x & 31; }
constexpr int ROWS_PER_LANE = 2;
DEVICE int fragment_row(int i) { return (lane_id() >> 2) + 8 * i; }
DEVICE int fragment_half(int i) { return i; }
DEVICE int fragment_quarter() { return lane_id() & 3; }

template <class T> struct MatrixFragment {
    static constexpr int TOKENS = 2;
    static constexpr int SIZE = 4;
    static constexpr int SCALE_ROWS = 1;
    float sum[SIZE], other[SIZE];  // two chains: one alone would wait for its own latency
    DEVICE void zero() { for (int i = 0; i < SIZE; ++i) sum[i] = other[i] = 0.f; }
    static DEVICE int token(int i) { return 2 * (lane_id() & 3) + (i & 1); }
    static DEVICE bool owns(int) { return true; }
    static DEVICE float sum_share() { return 1.f; }
    static DEVICE int row(int i) { return (lane_id() >> 2) + 8 * (i >> 1); }
    static DEVICE int scale_pair() { return lane_id() >> 2; }
    static constexpr int SCALES = 2;
    static DEVICE int scale_of(int i) { return i >> 1; }
    static DEVICE int scale_word(int, int, int group) { return group; }
    static DEVICE int scale_half(int j) { return j; }
    static constexpr bool OWN_ROWS = true;
    DEVICE void gather() { for (int i = 0; i < SIZE; ++i) sum[i] += other[i]; }
    DEVICE void finish() { gather(); }
    // The token whose activations this lane reads; columns past the last token repeat it and are never stored.
    static DEVICE int column(int tokens) { return lane_id() >> 2 < tokens ? lane_id() >> 2 : tokens - 1; }
    DEVICE void add(const Words4* a, const char* chunk, int, int) {
        const Words4 b = *reinterpret_cast<const Words4*>(chunk);
        multiply(sum, a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
        multiply(other, a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
    }
    static DEVICE void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
        if constexpr (T::BF16) {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        } else {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        }
    }
};
template <class OPERAND, class T> struct FragmentOf { using Type = MatrixFragment<OPERAND>; };
#endif
template <class F, class T> using FragmentFor = typename FragmentOf<typename F::template Operand<T>, T>::Type;
