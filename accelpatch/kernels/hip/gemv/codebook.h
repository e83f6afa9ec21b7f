// 4-bit codebooks (codebooks.py) for int8 matrix instructions: a value is an integer of two limbs of a byte, and each
// limb is multiplied by itself. The values of fp4 are multiples of 1/192, so that their integers are exact; those of
// nf4 are off by at most 2^-15 of the largest. The values of e2m1 are multiples of 1/2 and take one limb.
//
// BOOK_IN_HALVES: a lookup covers one half of the codebook, positive or negative values, and gives 0 for codes of the
// other half. The two halves are then multiplied apart.
#pragma once
#include "gemv.h"
#include "arch/portability.h"

template <int KIND> struct CodebookOf {
    static constexpr bool NF4 = KIND == OFFSET_NF4, E2M1 = KIND == OFFSET_E2M1;
    static constexpr int BYTES = E2M1 ? 1 : 2, LIMBS = BOOK_IN_HALVES ? 2 * BYTES : BYTES,
                         LIMB = BOOK_IN_HALVES ? 128 : 256;
    static constexpr int DIVIDED = E2M1 ? 1 : 256;          // sums of products are divided by it
    static constexpr int STEP = BOOK_IN_HALVES ? 85 : 168;  // the integer of 1/192 of fp4
    static constexpr int UNIT = E2M1 ? 2 : !NF4 ? 192 * STEP : BOOK_IN_HALVES ? 16383 : 32512;  // the integer of 1
    // The integer of a code as tiles store it, with its top bit inverted.
    static constexpr DEVICE int integer(int stored) {
        constexpr double NF4_VALUES[16] = {-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
            -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534,
            0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
            0.7229568362236023, 1.0};
        constexpr int FP4_VALUES[8] = {0, 1, 128, 192, 64, 96, 32, 48};
        constexpr int E2M1_VALUES[8] = {0, 1, 2, 3, 4, 6, 8, 12};
        const int code = stored ^ 8;
        if (E2M1) return code < 8 ? E2M1_VALUES[code & 7] : -E2M1_VALUES[code & 7];
        if (!NF4) return FP4_VALUES[code & 7] * (code < 8 ? STEP : -STEP);
        const double scaled = NF4_VALUES[code] * UNIT;
        return static_cast<int>(scaled < 0 ? scaled - .5 : scaled + .5);
    }
    // A limb of a code's integer; with BOOK_IN_HALVES of its magnitude.
    static constexpr DEVICE int limb(int stored, bool high) {
        const int value = BOOK_IN_HALVES && integer(stored) < 0 ? -integer(stored) : integer(stored),
                  low = BOOK_IN_HALVES ? value % LIMB : ((value + 128) & 255) - 128;
        return high ? (value - low) / LIMB : low;
    }
    // The limbs of four codes from `first` on, one a byte.
    static constexpr DEVICE uint32_t four(int first, bool high) {
        uint32_t out = 0;
        for (int i = 0; i < 4; ++i) out |= (static_cast<uint32_t>(limb(first + i, high)) & 255u) << (8 * i);
        return out;
    }
    template <bool HIGH> static DEVICE void bytes(const NibbleLookup& codes, int half, uint32_t* out) {
        constexpr uint32_t A = four(0, HIGH), B = four(4, HIGH), C = four(8, HIGH), D = four(12, HIGH);
        codes(A, B, C, D, half, out);
    }
    // The operand of each product, four codes a word: high limbs first; with BOOK_IN_HALVES codes 0 to 7 first.
    static DEVICE void operands(const NibbleLookup& codes, int half, uint32_t (&out)[LIMBS]) {
        if constexpr (E2M1) bytes<false>(codes, half, out);
        else bytes<true>(codes, half, out), bytes<false>(codes, half, out + LIMBS / 2);
    }
    static DEVICE float value(uint32_t stored) {
        const NibbleLookup codes(stored);
        uint32_t out[LIMBS];
        operands(codes, 0, out);
        int value = 0;
#pragma unroll
        for (int i = 0; i < LIMBS; ++i) {
            const int byte = static_cast<int8_t>(out[i] & 255u);
            value += (BYTES == 2 && i < LIMBS / 2 ? LIMB : 1) * (SIGNED(i) ? -byte : byte);
        }
        return static_cast<float>(value) / static_cast<float>(UNIT);
    }
    // Whether a product is subtracted: that of nf4's codes below 0, others' codes 8 to 15, which tiles hold as 0 to 7.
    static constexpr DEVICE bool SIGNED(int product) { return BOOK_IN_HALVES && product % 2 == (NF4 ? 1 : 0); }
};
