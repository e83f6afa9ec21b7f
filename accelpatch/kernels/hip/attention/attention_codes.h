// Caches in 8 bits: codes, and a scale in bfloat16 for each slot of a head (kernels/layouts/kv_states.py). Matrix
// instructions take codes directly, or as 16-bit floats that represent them exactly (attention_mma.h). A key's scale
// multiplies its score, a value's scale its probability. Each KV split of 256 slots has a sum of its own, and a tree
// reduces the splits: no sum runs over the whole cache.
#pragma once
#include "gemv/e4m3.h"

// A dtype of activations, in a model whose cache has codes of another format.
template <class T, class CODES_> struct Coded : T {
    using Codes = CODES_;
};
template <class T> constexpr bool CODED = false;
template <class T, class CODES> constexpr bool CODED<Coded<T, CODES>> = true;
template <class T> constexpr int CACHE_BYTES = CODED<T> ? 1 : 2;  // of a number

struct alignas(8) Words2 {
    uint32_t x, y;
};

struct Int8Codes {
    static constexpr float LARGEST = 127.f;
    static DEVICE float up(uint32_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }
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
    static DEVICE uint32_t rounded(float v) {
        const float all[4] = {v, 0.f, 0.f, 0.f};
        return E4m3<false>::rounded(all) & 0xffu;
    }
};

// A new key or value as it lies in shared memory: 16-bit numbers, or codes and behind them, at the end of the room for
// such numbers, their scale.
template <class T, int WIDE> DEVICE float fresh_number(const char* row, int column) {
    if constexpr (CODED<T>)
        return T::Codes::up(static_cast<uint8_t>(row[column])) *
               Bf16::up(*reinterpret_cast<const uint16_t*>(row + WIDE * 2));
    else return T::up(reinterpret_cast<const uint16_t*>(row)[column]);
}
