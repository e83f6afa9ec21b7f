// Weight formats: how the 16 bytes that a lane holds of one row and one step become pairs of 16-bit floats.
//
// A step is KSTEP values of K: SUB sub-steps of 32, each two matrix products of 16. Activations lie in shared memory in
// chunks of 8; `chunk(p, quarter)` says which chunk of a step the words of sub-step p belong to. Every format but Plain
// expands to fp16, in which its values are exact and cheap to make; bf16 activations are staged as fp16 too, times a
// power of two a token (stage.h).
#pragma once
#include "gemv.h"
#include "portability.h"

DEVICE uint32_t word_of(const Words4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE uint32_t twice(float value) {
    const uint32_t bits = F16::down(value);
    return bits | bits << 16;
}

struct Taken {  // what a group's expansion takes off, as pairs; formats without a zero point leave it out
    uint32_t ones, sixteens;
};

// fp16 or bf16 weights, row-major.
struct Plain {
    template <class T> using Operand = T;
    static constexpr int KSTEP = 32, SUB = 1, GROUPS = 0, STEP_BYTES = 64, VALUE_BITS = 16, TOKEN_PAD = 64;
    static constexpr bool TILED = false, SPLIT = false, SUMS = false, TAKES = false, OFFSETS = false;
    static DEVICE int chunk(int p, int quarter) { return 4 * p + quarter; }
    static DEVICE Taken taken(float) { return {0, 0}; }
    static DEVICE Words4 expand(const Words4& raw, int, Taken) { return raw; }
};

// int8 weights, row-major. GROUPS_ = 0: one scale a row; 1: groups of 64 or a multiple; 2: groups of 32, for which a
// lane takes its bytes as two runs of 8 so that no matrix product mixes two groups.
template <int GROUPS_> struct Int8 {
    template <class T> using Operand = F16;
    static constexpr int KSTEP = 64, SUB = 2, GROUPS = GROUPS_, STEP_BYTES = 64, VALUE_BITS = 8, TOKEN_PAD = GROUPS_ == 2 ? 64 : 16;
    static constexpr bool TILED = false, SPLIT = GROUPS_ == 2, SUMS = false, TAKES = false, OFFSETS = false;
    static DEVICE int chunk(int p, int quarter) { return SPLIT ? 4 * p + quarter : 2 * quarter + p; }
    static DEVICE Taken taken(float) { return {0, 0}; }
    template <int PAIR> static DEVICE uint32_t pair(uint32_t w) {  // (1024 + (q + 128)) - 1152
        return pair_subtract(bytes_below<PAIR>(w, 0x64646464u), 0x64806480u);
    }
    static DEVICE Words4 expand(const Words4& raw, int p, Taken) {
        const uint32_t a = word_of(raw, 2 * p) ^ 0x80808080u, b = word_of(raw, 2 * p + 1) ^ 0x80808080u;
        return {pair<0>(a), pair<1>(a), pair<0>(b), pair<1>(b)};
    }
};

// int4 weights in tiles of 16 rows by 128 values: 16 bytes for (row r, quarter t) at (4 r + t) * 16; word p holds values
// 32 p + 8 t + e, value e = 2 i in nibble i, e = 2 i + 1 in nibble i + 4. Scales: [tile][step][r % 8][GROUPS][r / 8].
// A nibble in the low mantissa bits of 1024 reads 1024 + u, four bits higher 1024 + 16 u: two of each pair of pairs need
// no shift. The base and the zero point go in the same instruction, exactly, so that an infinite activation keeps its
// sign. A float minimum does not fit there: s u + m = s (u - 8) + (m + 8 s), the latter times the sum of activations.
template <int GROUPS_, int KIND> struct Int4 {
    template <class T> using Operand = F16;
    static constexpr int KSTEP = 128, SUB = 4, GROUPS = GROUPS_, STEP_BYTES = 1024, VALUE_BITS = 4, TOKEN_PAD = 64;
    static constexpr bool TILED = true, SPLIT = false, SUMS = KIND == OFFSET_MINIMUM, TAKES = KIND == OFFSET_ZERO_POINT, OFFSETS = SUMS || TAKES;
    static DEVICE int chunk(int p, int quarter) { return 4 * p + quarter; }
    static DEVICE float rest(float scale, float minimum) { return fmaf(8.f, scale, minimum); }
    static DEVICE Taken taken(float offset) {
        if constexpr (TAKES) return {twice(1024.f + offset), twice(-64.f - offset)};
        else return {0x64086408u, 0xd480d480u};  // 1032 and -72
    }
    static DEVICE uint32_t low(uint32_t w, Taken t) { return pair_subtract(and_or(w, 0x000f000fu, 0x64006400u), t.ones); }
    static DEVICE uint32_t high(uint32_t w, Taken t) { return pair_fma(and_or(w, 0x00f000f0u, 0x64006400u), 0x2c002c00u, t.sixteens); }
    static DEVICE Words4 expand(const Words4& raw, int p, Taken t) {
        const uint32_t w = word_of(raw, p);
        return {low(w, t), high(w, t), low(w >> 8, t), high(w >> 8, t)};
    }
    // The code of value k of a tile's row r.
    static DEVICE float code(const uint32_t* tile, int r, int k) {
        const uint32_t word = tile[k / KSTEP * 256 + (4 * r + k / 8 % 4) * 4 + k / 32 % 4];
        return static_cast<float>(word >> (4 * (k / 2 % 4) + 16 * (k % 2)) & 15u);
    }
};

// fp8 e4m3 weights, row-major, one scale a row. The bits moved into fp16 are the value times 2^-8 (fnuz: 2^-7),
// subnormals included. NaN (0x7f, and 0x80 of the fnuz form) is put in by a mask.
template <bool FNUZ> struct Fp8 {
    template <class T> using Operand = F16;
    static constexpr int KSTEP = 64, SUB = 2, GROUPS = 0, STEP_BYTES = 64, VALUE_BITS = 8, TOKEN_PAD = 16;
    static constexpr bool TILED = false, SPLIT = false, SUMS = false, TAKES = false, OFFSETS = false;
    static DEVICE int chunk(int p, int quarter) { return 2 * quarter + p; }
    static DEVICE Taken taken(float) { return {0, 0}; }
    template <int PAIR> static DEVICE uint32_t pair(uint32_t w) {
        const uint32_t v = bytes_below<PAIR>(w, 0u) << 8;
        const uint32_t magnitude = v & 0x7f007f00u, sign = v & 0x80008000u;
        uint32_t nan;
        if constexpr (FNUZ) {  // 0x80: sign set, magnitude zero
            const uint32_t any = magnitude + 0x7f007f00u;  // bit 15 of a half: magnitude not zero
            nan = (sign & ~any) >> 15;
        } else {  // 0x7f: every magnitude bit set
            nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;
        }
        return pair_fma(sign | magnitude >> 1 | nan * 0x7fc0u, FNUZ ? 0x58005800u : 0x5c005c00u, 0x80008000u);
    }
    static DEVICE Words4 expand(const Words4& raw, int p, Taken) {
        const uint32_t a = word_of(raw, 2 * p), b = word_of(raw, 2 * p + 1);
        return {pair<0>(a), pair<1>(a), pair<0>(b), pair<1>(b)};
    }
};
