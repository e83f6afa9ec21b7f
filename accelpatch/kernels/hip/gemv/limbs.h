// Activations as 16-bit integers for int8 matrix instructions. Blocks of 128 values of K share a block exponent, chosen
// so that the largest magnitude of a block has 15 bits. An integer is two limbs of a byte, high * 256 + low. bf16
// values within a factor of 2^7 of each other are exact; others are off by at most 2^-16 of the block's largest.
//
// Shared memory has slots of 16 values: 16 high limbs, then 16 low ones. Slot s of a row is chunks 2 s and 2 s + 1,
// or, interleaved, chunks 8 (s / 4) + s % 4 and that + 4; eight neighbouring slots are a block. Until a slot is
// converted it contains the values as 16-bit floats.
#pragma once
#include "norm.h"

// Which chunks of a row make a slot, and the conversion of a slot's values to two int8 limbs.
template <class F, class T, bool NARROW> struct Limbs {
    static constexpr int BLOCK = 8;  // slots that share a block exponent
    // Whether low limbs are unsigned, which needs matrix instructions of unsigned bytes; else they are signed, and the
    // high limbs are rounded accordingly.
    static constexpr bool PLAIN_LOW = !NARROW && UNSIGNED_BYTES;
    // The bits of 1.5 * 2^23: the low bytes of a value added to it are the limbs. 128 more where low limbs are signed.
    static constexpr uint32_t ZERO = PLAIN_LOW ? 0x4b400000u : 0x4b400080u;
    static constexpr uint32_t BUMP = 0x10000u;  // a magnitude that rounds to 2^15 or more needs the next block exponent
    static constexpr int SMALL = 16;  // least biased exponent of a block for which the inverse of its scale is a float
    // Whether the largest magnitude of any block is too small for limbs, or not finite. A block of zeros is neither.
    struct Extremes {
        uint32_t high = 0, low = ~0u;
        DEVICE void see(uint32_t most) { high = max(high, most), low = min(low, most - 1); }
        DEVICE bool odd() const {
            return high >= (T::BF16 ? 0x7f80u : 0x7c00u) || (T::BF16 && low < (SMALL << 7) - 2u);
        }
    };

    // The value of K with which the first or the last half of a slot begins.
    static constexpr int HALF = F::INTERLEAVED ? 32 : 8;  // values from the first half to the last
    static DEVICE int place(uint32_t slot, int half) {
        return 8 * (F::INTERLEAVED ? slot + (slot & ~3u) : 2 * slot) + half * HALF;
    }
    // The eight lanes of a block may load its two lines whole, a chunk of each line: a half of one slot, and the same
    // half of the slot that is four further.
    static DEVICE uint32_t line_chunk(uint32_t slot, int line) {
        return (slot & ~7u) * 16 + (threadIdx.x & 7) * 8 + line * 64;
    }
    static DEVICE int piece_slot(int slot) { return (slot & ~7) + (F::INTERLEAVED ? slot & 3 : slot >> 1 & 3); }
    static DEVICE int piece_half() { return (F::INTERLEAVED ? threadIdx.x >> 2 : threadIdx.x) & 1; }
    // Exchanges chunks that were loaded so, for interleaved formats: lane i of the block then has slot i. Precondition:
    // all lanes of the warp call it.
    static DEVICE void swap(Words4 (&v)[2]) {
        constexpr int MATE = 4;
        const bool last = threadIdx.x & MATE;
        const Words4 give = last ? v[0] : v[1], received = {lane_xor(give.x, MATE), lane_xor(give.y, MATE),
                                                    lane_xor(give.z, MATE), lane_xor(give.w, MATE)};
        v[0] = last ? received : v[0], v[1] = last ? v[1] : received;
    }
    // The largest magnitude of each slot's block, as bits of T. Precondition: every lane of a block calls it. Several
    // slots are reduced at once, since each exchange of one slot waits for the one before.
    template <int COUNT> static DEVICE void of_blocks(const Words4 (&raw)[COUNT][2], uint32_t (&most)[COUNT]) {
        constexpr uint32_t MAGNITUDES = 0x7fff7fffu;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            most[j] = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) most[j] = pair_max(most[j], word_of(raw[j][i / 4], i % 4) & MAGNITUDES);
        }
#pragma unroll
        for (int step = 1; step < BLOCK; step *= 2)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) most[j] = pair_max(most[j], lane_xor(most[j], step));
#pragma unroll
        for (int j = 0; j < COUNT; ++j) most[j] = max(most[j] & 0xffffu, most[j] >> 16);
    }
    static DEVICE uint32_t exponent(uint32_t most) { return (float_to_bits(T::up(most)) + BUMP) >> 23; }
    static DEVICE void put(char* at, uint32_t a, uint32_t b) {
        struct alignas(8) Pair {
            uint32_t a, b;
        };
        *reinterpret_cast<Pair*>(at) = {a, b};
    }
    // Converts a chunk to two words of high limbs and two of low ones; returns the sum of its integers.
    static DEVICE int limbs_of(const Words4& raw, float times, uint32_t (&words)[4]) {
        float v[8];
        uint32_t q[8];
        unpack<T>(raw, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) q[e] = float_to_bits(fmaf(v[F::order(e)], times, bits_to_float(ZERO)));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const uint32_t a = permute<0x5140>(q[4 * part], q[4 * part + 1]),
                           b = permute<0x5140>(q[4 * part + 2], q[4 * part + 3]);
            words[part] = permute<0x7632>(a, b),
            words[2 + part] = permute<0x5410>(a, b) ^ (PLAIN_LOW ? 0u : 0x80808080u);
        }
        return sum_of_bytes<true>(words[1], sum_of_bytes<true>(words[0], 0)) * 256 +
               sum_of_bytes<!PLAIN_LOW>(words[3], sum_of_bytes<!PLAIN_LOW>(words[2], 0));
    }
    // Sums of the activations of a group: how many lanes a group's chunks are spread over (LANES), how many sums a lane
    // has in the end (KEPT), and where they go (place).
    template <bool PIECES> struct GroupSums {
        static constexpr int LANES = PIECES           ? (F::GROUPS == 4 ? 4 : 8)
                                     : F::GROUPS == 1 ? 8
                                                      : 4,
                             KEPT = F::GROUPS == 1             ? 1
                                    : PIECES || F::GROUPS == 4 ? 2
                                                               : 1;
        static DEVICE int place(int slot, int h) {
            if (F::GROUPS == 1) return slot / BLOCK;
            if (!PIECES) return slot / 4 * KEPT + h;
            return F::GROUPS == 2 ? slot / 4 + h : (slot / 4 + h) * 2 + piece_half();
        }
        template <int COUNT> static DEVICE void add_up(int (&sums)[COUNT][2]) {
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                if (KEPT == 1) sums[j][0] += sums[j][1];
#pragma unroll
            for (int step = 1; step < LANES; step *= 2)
#pragma unroll
                for (int j = 0; j < COUNT; ++j)
#pragma unroll
                    for (int h = 0; h < KEPT; ++h) sums[j][h] += lane_xor(sums[j][h], step);
        }
    };
};
