// Weight formats: how the 16 bytes that a lane holds of one row and one step become pairs of 16-bit floats.
//
// A step is KSTEP values of K: SUB sub-steps of 32, each two matrix products of 16. Activations lie in shared memory as
// they come, in chunks of 8; `chunk(p, quarter)` says which chunk of a step the words of sub-step p belong to.
#pragma once
#include "gemv.h"
#include "portability.h"

DEVICE uint32_t word_of(const Words4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// a - b and a * b + c on pairs of 16-bit floats; exact for the small integers that the formats use.
template <class T> DEVICE uint32_t pair_subtract(uint32_t a, uint32_t b) {
#if ACCELPATCH_AMD
    const float lo = T::up(a & 0xffffu) - T::up(b & 0xffffu), hi = T::up_high(a) - T::up_high(b);
    if constexpr (T::BF16) return high_halves(float_to_bits(lo), float_to_bits(hi));
    else return T::down(lo) | (T::down(hi) << 16);
#else
    uint32_t d;
    if constexpr (T::BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    else asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#endif
}

// Takes the factor 2^-120 out of a pair of bf16; fp16 is left as it is.
template <class T> DEVICE uint32_t pair_unscale(uint32_t a) {
    if constexpr (!T::BF16) return a;
#if ACCELPATCH_AMD
    return high_halves(float_to_bits(T::up(a & 0xffffu) * 0x1p120f), float_to_bits(T::up_high(a) * 0x1p120f));
#else
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x7b807b80u), "r"(0x80008000u));
    return d;
#endif
}

// fp16 or bf16 weights, row-major.
struct Plain {
    static constexpr int KSTEP = 32, SUB = 1, GROUPS = 0, STEP_BYTES = 64, VALUE_BITS = 16, TOKEN_PAD = 64;
    static constexpr bool TILED = false, SPLIT = false, SUMS = false, OFFSETS = false, SUBTRACT = false;
    template <class T> static DEVICE float base() { return 0.f; }  // what every expanded value has too much
    template <class T> static DEVICE float unit() { return 1.f; }  // what one of an expanded value is worth
    static DEVICE int chunk(int p, int quarter) { return 4 * p + quarter; }
    template <class T> static DEVICE Words4 expand(const Words4& raw, int, uint32_t) { return raw; }
};

// int8 weights, row-major. GROUPS_ = 0: one scale a row; 1: groups of 64 or a multiple; 2: groups of 32, for which a
// lane takes its bytes as two runs of 8 so that no matrix product mixes two groups.
template <int GROUPS_> struct Int8 {
    static constexpr int KSTEP = 64, SUB = 2, GROUPS = GROUPS_, STEP_BYTES = 64, VALUE_BITS = 8, TOKEN_PAD = GROUPS_ == 2 ? 64 : 16;
    static constexpr bool TILED = false, SPLIT = GROUPS_ == 2, SUMS = false, OFFSETS = false, SUBTRACT = false;
    template <class T> static DEVICE float base() { return 0.f; }
    template <class T> static DEVICE float unit() { return 1.f; }
    static DEVICE int chunk(int p, int quarter) { return SPLIT ? 4 * p + quarter : 2 * quarter + p; }
    template <class T, int PAIR> static DEVICE uint32_t pair(uint32_t w) {
#if ACCELPATCH_AMD
        const float lo = static_cast<float>(static_cast<int8_t>(w >> 16 * PAIR)), hi = static_cast<float>(static_cast<int8_t>(w >> (16 * PAIR + 8)));
        if constexpr (T::BF16) return high_halves(float_to_bits(lo), float_to_bits(hi));
        else return T::down(lo) | (T::down(hi) << 16);
#else
        const uint32_t v = spread_bytes<PAIR>(w);
        if constexpr (T::BF16) {  // (128 + low seven bits) - (128, or 256 where the sign is set)
            return pair_subtract<T>(and_or(v, 0x007f007fu, 0x43004300u), and_or(v, 0x00800080u, 0x43004300u));
        } else {  // (1024 + (q + 128)) - 1152
            return pair_subtract<T>(v ^ 0x64806480u, 0x64806480u);
        }
#endif
    }
    template <class T> static DEVICE Words4 expand(const Words4& raw, int p, uint32_t) {
        const uint32_t a = word_of(raw, 2 * p), b = word_of(raw, 2 * p + 1);
        return {pair<T, 0>(a), pair<T, 1>(a), pair<T, 0>(b), pair<T, 1>(b)};
    }
};

// int4 weights in tiles of 16 rows by 128 values: 16 bytes for (row r, quarter t) at (4 r + t) * 16; word p holds values
// 32 p + 8 t + e, value e = 2 i in nibble i, e = 2 i + 1 in nibble i + 4. Scales: [tile][step][r % 8][GROUPS][r / 8].
// The magic number's base and the zero point go out in registers where packed arithmetic is at hand (exact, so that an
// infinite activation keeps its sign), else by the groups' sums of activations: s (a - base X), X the sum.
template <int GROUPS_, int KIND> struct Int4 {
    static constexpr int KSTEP = 128, SUB = 4, GROUPS = GROUPS_, STEP_BYTES = 1024, VALUE_BITS = 4, TOKEN_PAD = 64;
    static constexpr bool TILED = true, SPLIT = false, SUBTRACT = !ACCELPATCH_AMD && KIND != OFFSET_MINIMUM, SUMS = !SUBTRACT, OFFSETS = KIND != OFFSET_NONE;
    template <class T> static DEVICE float base() { return T::NIBBLE_BASE; }
    template <class T> static DEVICE float unit() { return 1.f; }
    static DEVICE int chunk(int p, int quarter) { return 4 * p + quarter; }
    template <class T> static DEVICE uint32_t pair(uint32_t w, int i) {
        const int shift = 4 * i - T::NIBBLE_SHIFT;
        const uint32_t moved = shift >= 0 ? w >> shift : w << -shift;
        return and_or(moved, 0x000f000fu << T::NIBBLE_SHIFT, T::NIBBLE_MAGIC);
    }
    template <class T> static DEVICE uint32_t less(uint32_t v, uint32_t zero) {
        if constexpr (SUBTRACT) return pair_subtract<T>(v, zero);
        return v;
    }
    // zero: base plus zero point, twice (SUBTRACT alone).
    template <class T> static DEVICE Words4 expand(const Words4& raw, int p, uint32_t zero) {
        const uint32_t w = word_of(raw, p);
        return {less<T>(pair<T>(w, 0), zero), less<T>(pair<T>(w, 1), zero), less<T>(pair<T>(w, 2), zero), less<T>(pair<T>(w, 3), zero)};
    }
};

// fp8 e4m3 weights, row-major, one scale a row. The bits moved into a 16-bit float are the value times a power of two
// (2^-8 in fp16, 2^-120 in bf16), subnormals included: fp16 leaves it to the row's scale, bf16 multiplies by 2^120 at
// once, since products so small would leave fp32's range. NaN (0x7f, and 0x80 of the fnuz form) is put in by a mask.
template <bool FNUZ> struct Fp8 {
    static constexpr int KSTEP = 64, SUB = 2, GROUPS = 0, STEP_BYTES = 64, VALUE_BITS = 8, TOKEN_PAD = 16;
    static constexpr bool TILED = false, SPLIT = false, SUMS = false, OFFSETS = false, SUBTRACT = false;
    template <class T> static DEVICE float base() { return 0.f; }
    template <class T> static DEVICE float unit() { return T::BF16 ? (FNUZ ? .5f : 1.f) : (FNUZ ? 128.f : 256.f); }
    static DEVICE int chunk(int p, int quarter) { return 2 * quarter + p; }
    template <class T, int PAIR> static DEVICE uint32_t pair(uint32_t w) {
        const uint32_t v = spread_bytes<PAIR>(w) << 8;
        const uint32_t magnitude = v & 0x7f007f00u, sign = v & 0x80008000u;
        uint32_t nan;
        if constexpr (FNUZ) {  // 0x80: sign set, magnitude zero
            const uint32_t any = magnitude + 0x7f007f00u;  // bit 15 of a half: magnitude not zero
            nan = (sign & ~any) >> 15;
        } else {  // 0x7f: every magnitude bit set
            nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;
        }
        const uint32_t value = T::BF16 ? magnitude >> 4 : magnitude >> 1;
        return pair_unscale<T>(sign | value | nan * 0x7fc0u);
    }
    template <class T> static DEVICE Words4 expand(const Words4& raw, int p, uint32_t) {
        const uint32_t a = word_of(raw, 2 * p), b = word_of(raw, 2 * p + 1);
        return {pair<T, 0>(a), pair<T, 1>(a), pair<T, 0>(b), pair<T, 1>(b)};
    }
};
