// Caches in 8 bits: codes, and a scale in bfloat16 for each slot of a head (kernels/layouts/kv_states.py). Products
// take codes as bfloat16, which holds them exactly; a key's scale multiplies its score, a value's scale its weight. A
// KV split of 256 slots is added up by itself in float32, and splits as a tree: no sum runs over the whole cache.
#pragma once
#include "gemv/e4m3.h"

// A dtype of activations beside a cache of codes.
template <class T, class CODES_> struct Coded : T {
    using Codes = CODES_;
};
template <class T> constexpr bool CODED = false;
template <class T, class CODES> constexpr bool CODED<Coded<T, CODES>> = true;
template <class T> constexpr int CACHE_BYTES = CODED<T> ? 1 : 2;  // of a number

struct alignas(8) Words2 {
    uint32_t x, y;
};

constexpr bool CODES_BY_FLOATS = WARP_SIZE == 64;  // AMD's instructions take any byte of a word to a float
// Two numbers that bfloat16 holds exactly.
DEVICE uint32_t exact_pair(float low, float high) { return permute<0x7632>(float_to_bits(low), float_to_bits(high)); }

struct Int8Codes {
    static constexpr float LARGEST = 127.f;
    static DEVICE float up(uint32_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }
    // Bytes I of `low` and J of `high` as a pair of bfloat16.
    template <int I, int J> static DEVICE uint32_t pair(uint32_t low, uint32_t high) {
        if constexpr (CODES_BY_FLOATS) {
            return exact_pair(up(low >> 8 * I), up(high >> 8 * J));
        } else {  // 128 + x less 128; where x is negative 256 + x less 256
            const uint32_t v = permute < I | (J + 4) << 8 > (low, high);
            return pair_fma_bf16((v & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (v & 0x007f007fu) | 0x43004300u);
        }
    }
    static DEVICE uint32_t rounded(float v) {  // |v| is little more than 127 at most
        return static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(rintf(v), -LARGEST), LARGEST))) & 0xffu;
    }
};
struct E4m3Codes {
    static constexpr float LARGEST = 448.f;
    // Bits moved into a float are the value times 2^-120, subnormals included; no code of a cache is NaN.
    static DEVICE float up(uint32_t byte) {
        return bits_to_float((byte & 0x80u) << 24 | (byte & 0x7fu) << 20) * 0x1p120f;
    }
    template <int I, int J> static DEVICE uint32_t pair(uint32_t low, uint32_t high) {
        if constexpr (CODES_BY_FLOATS) {
            return exact_pair(up(low >> 8 * I), up(high >> 8 * J));
        } else {
            const uint32_t v = permute < I << 4 | (J + 4) << 12 > (low, high);
            return pair_fma_bf16((v & 0x80008000u) | (v >> 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
        }
    }
    static DEVICE uint32_t rounded(float v) {
        const float all[4] = {v, 0.f, 0.f, 0.f};
        return E4m3<false>::rounded(all) & 0xffu;
    }
};

// Eight codes of two words as eight numbers.
template <class CODES> DEVICE Words4 expanded(uint32_t low, uint32_t high) {
    return {CODES::template pair<0, 1>(low, low), CODES::template pair<2, 3>(low, low),
        CODES::template pair<0, 1>(high, high), CODES::template pair<2, 3>(high, high)};
}

// A new key or value as it lies in shared memory: 16-bit numbers, or codes and behind them, at the end of the room for
// such numbers, their scale.
template <class T, int WIDE> DEVICE float fresh_number(const char* row, int column) {
    if constexpr (CODED<T>)
        return T::Codes::up(static_cast<uint8_t>(row[column])) *
               Bf16::up(*reinterpret_cast<const uint16_t*>(row + WIDE * 2));
    else return T::up(reinterpret_cast<const uint16_t*>(row)[column]);
}

// AttentionTile, and its products with values that are codes: add_codes, of two products whose columns lie beside each
// other. product: the number of the first.
template <class T> struct CacheTile : AttentionTile<T> {};
#if defined(__HIP__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#include "attention_codes_amd.h"
#else
#include "attention_codes_nvidia.h"
#endif
