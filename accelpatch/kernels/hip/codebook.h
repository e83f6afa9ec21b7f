// Codebooks of 4 bits (layouts/codebooks.py), as 16-bit integers: two bytes, high * 256 + low. fp4's values are whole
// multiples of a 192nd, so that its integers are exact; nf4's lose at most 2^-16 of the largest.
#pragma once
#include "gemv.h"
#include "portability.h"

template <int KIND> struct CodebookOf {
    static constexpr bool NF4 = KIND == OFFSET_NF4;
    static constexpr float UNIT = NF4 ? 32512.f : 192.f * 168.f;  // what the largest value is
    // The integer of a code as tiles hold it, with its top bit turned.
    static constexpr DEVICE int integer(int held) {
        constexpr double NF4_VALUES[16] = {-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
            -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534,
            0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
            0.7229568362236023, 1.0};
        constexpr int FP4_VALUES[8] = {0, 1, 128, 192, 64, 96, 32, 48};
        const int code = held ^ 8;
        if (!NF4) return FP4_VALUES[code & 7] * (code < 8 ? 168 : -168);
        const double scaled = NF4_VALUES[code] * 32512.0;
        return static_cast<int>(scaled < 0 ? scaled - .5 : scaled + .5);
    }
    static constexpr DEVICE int low_byte(int held) { return ((integer(held) + 128) & 255) - 128; }
    static constexpr DEVICE int high_byte(int held) { return (integer(held) - low_byte(held)) / 256; }
    // Four bytes of the book from code `first` on.
    template <bool HIGH> static constexpr DEVICE uint32_t four(int first) {
        uint32_t out = 0;
        for (int i = 0; i < 4; ++i)
            out |= (static_cast<uint32_t>(HIGH ? high_byte(first + i) : low_byte(first + i)) & 255u) << (8 * i);
        return out;
    }
    template <bool HIGH> static DEVICE uint32_t bytes(const NibbleLookup& codes, int half) {
        constexpr uint32_t A = four<HIGH>(0), B = four<HIGH>(4), C = four<HIGH>(8), D = four<HIGH>(12);
        return codes(A, B, C, D, half);
    }
    static DEVICE uint32_t high(const NibbleLookup& codes, int half) { return bytes<true>(codes, half); }
    static DEVICE uint32_t low(const NibbleLookup& codes, int half) { return bytes<false>(codes, half); }
    static DEVICE float value(uint32_t held) {
        const NibbleLookup codes(held);
        const int first = static_cast<int8_t>(high(codes, 0) & 255u), last = static_cast<int8_t>(low(codes, 0) & 255u);
        return static_cast<float>(first * 256 + last) / UNIT;
    }
};
