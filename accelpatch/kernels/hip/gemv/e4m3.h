// 8-bit floats of four bits of exponent and three of mantissa: e4m3fn (OCP's, NaN is 0x7f), or FNUZ, that of gfx942,
// whose exponents are one lower, and whose only NaN lies in the place of a negative zero.
#pragma once
#include "arch/portability.h"

template <bool FNUZ_> struct E4m3 {
    using Half = F16;
    static constexpr bool FNUZ = FNUZ_;
    static constexpr float LARGEST = FNUZ ? 240.f : 448.f;

    // Four values to the nearest, ties to even, saturated; of NaN any byte.
    static DEVICE uint32_t rounded(const float (&v)[4]) {
        if constexpr (E4M3_HERE<FNUZ>) {
            return floats_to_e4m3(v[0], v[1], v[2], v[3]);
        } else {
            uint32_t q[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) q[e] = byte_of(fminf(fmaxf(v[e], -LARGEST), LARGEST));
            return q[0] | q[1] << 8 | q[2] << 16 | q[3] << 24;
        }
    }
    // Four of them as two pairs of fp16, where all of them are normal numbers.
    static DEVICE void halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
        if constexpr (E4M3_HERE<FNUZ>) {
            e4m3_to_halves(bytes, low, high);
        } else {
            low = pair<0x4140>(bytes), high = pair<0x4342>(bytes);
        }
    }
    // The two that BYTES names. Their bits moved into fp16 are the value times 2^-8 (fnuz: 2^-7), subnormals included;
    // NaN is put in by a mask.
    template <uint32_t BYTES> static DEVICE uint32_t pair(uint32_t bytes) {
        const uint32_t v = permute<BYTES>(bytes, 0u) << 8;
        const uint32_t magnitude = v & 0x7f007f00u, sign = v & 0x80008000u;
        uint32_t nan;
        if constexpr (FNUZ) {                              // 0x80: sign set, magnitude zero
            const uint32_t any = magnitude + 0x7f007f00u;  // bit 15 of a half: magnitude not zero
            nan = (sign & ~any) >> 15;
        } else {  // 0x7f: every magnitude bit set
            nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;
        }
        return pair_fma(sign | magnitude >> 1 | nan * 0x7fc0u, FNUZ ? 0x58005800u : 0x5c005c00u, 0x80008000u);
    }

private:
    static DEVICE uint32_t byte_of(float v) {
        constexpr float NORMAL = FNUZ ? 0x1p-7f : 0x1p-6f;      // the smallest one
        constexpr float SUBNORMALS = FNUZ ? 0x1p13f : 0x1p14f;  // whose last bit is worth that of a subnormal
        constexpr uint32_t BIAS = FNUZ ? 119 : 120;             // of a float's exponent less that of these
        const uint32_t bits = float_to_bits(v), magnitude = bits & 0x7fffffffu;
        const uint32_t q = fabsf(v) < NORMAL ? float_to_bits(fabsf(v) + SUBNORMALS) & 0xffu
                                             : ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - BIAS * 8;
        return FNUZ && q == 0 ? 0 : q | (bits >> 24 & 0x80u);
    }
};
