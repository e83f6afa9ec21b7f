// Rows of a KV cache that is not in float32, read into floats and written from them. The formats, with the reasons for
// their scales and roundings, are those of ../layouts/kv_states.py.
#pragma once
#include "accelpatch_cpu.h"
#include "vec.h"

namespace {

// Four bits of exponent, three of mantissa, NaN is 0x7f; no subnormal floats are needed on the way.
AP_INLINE float from_e4m3(uint8_t byte) {
    const uint32_t magnitude = byte & 0x7fu, sign = (byte & 0x80u) << 24;
    uint32_t bits = (magnitude << 20) + (120u << 23);
    if (magnitude < 8) {  // subnormal: as if it had a leading one, which is taken off again
        const uint32_t one = (magnitude << 20) + (121u << 23);
        float f;
        memcpy(&f, &one, 4);
        f -= 0x1p-6f;
        memcpy(&bits, &f, 4);
    }
    bits = magnitude == 0x7f ? 0x7fc00000u : bits;
    bits |= sign;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// To the nearest, ties to even; |x| is at most 448, or little more.
AP_INLINE uint8_t to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    float a;
    memcpy(&a, &magnitude, 4);
    if (a >= 448.0f) return static_cast<uint8_t>(sign | 0x7e);
    if (a < 0x1p-6f) {  // the last bit of 2^14 + a is worth that of a subnormal
        a += 0x1p14f;
        memcpy(&bits, &a, 4);
        return static_cast<uint8_t>(sign | (bits & 0xffu));
    }
    return static_cast<uint8_t>(sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - 120 * 8));
}

// A head's cache. scales: bfloat16, of formats that have them. Of pages: slot i lies `stride` * index[i] numbers on.
struct CacheRows {
    int32_t format;
    void* codes;
    uint16_t* scales;
    const int64_t* index;
    int64_t stride;
};

// Where a slot of floats lies.
inline float* float_row(const CacheRows& c, int64_t at, int64_t d) {
    return static_cast<float*>(c.codes) + (c.format == AP_CACHE_PAGES ? c.index[at] * c.stride : at * d);
}

// Slots at .. at + count - 1 of d numbers.
inline void read_rows(const CacheRows& c, int64_t at, int64_t count, int64_t d, float* out) {
    for (int64_t i = 0; i < count; i++, out += d) {
        if (c.format == AP_CACHE_PAGES) {
            memcpy(out, float_row(c, at + i, d), static_cast<size_t>(d) * 4);
            continue;
        }
        const int64_t row = (at + i) * d;
        if (c.format == AP_CACHE_BF16) {
            const uint16_t* q = static_cast<const uint16_t*>(c.codes) + row;
            for (int64_t k = 0; k < d; k++) out[k] = from_bfloat16(q[k]);
            continue;
        }
        const float scale = from_bfloat16(c.scales[at + i]);
        if (c.format == AP_CACHE_INT8) {
            const int8_t* q = static_cast<const int8_t*>(c.codes) + row;
            for (int64_t k = 0; k < d; k++) out[k] = static_cast<float>(q[k]) * scale;
        } else {
            const uint8_t* q = static_cast<const uint8_t*>(c.codes) + row;
            for (int64_t k = 0; k < d; k++) out[k] = from_e4m3(q[k]) * scale;
        }
    }
}

inline void write_row(const CacheRows& c, int64_t at, int64_t d, const float* x) {
    if (c.format == AP_CACHE_BF16) {
        uint16_t* q = static_cast<uint16_t*>(c.codes) + at * d;
        for (int64_t k = 0; k < d; k++) q[k] = to_bfloat16(x[k]);
        return;
    }
    const bool whole = c.format == AP_CACHE_INT8;
    float most = 0;
    for (int64_t k = 0; k < d; k++) most = fabsf(x[k]) <= most ? most : fabsf(x[k]);  // a NaN stays
    for (int64_t k = 0; k < d; k++) most = x[k] == x[k] ? most : x[k];
    c.scales[at] = to_bfloat16(most / (whole ? 127.0f : 448.0f));
    const float scale = from_bfloat16(c.scales[at]);
    auto* q = static_cast<uint8_t*>(c.codes) + at * d;
    if (!(scale > 0) || scale == INFINITY) {  // zeros; or the row is read as NaN, whatever its codes are
        memset(q, 0, static_cast<size_t>(d));
        return;
    }
    for (int64_t k = 0; k < d; k++) {
        const float v = x[k] / scale;
        if (whole) {
            const float rounded = (v + 12582912.0f) - 12582912.0f;  // 1.5 2^23: to the nearest, ties to even
            q[k] = static_cast<uint8_t>(static_cast<int8_t>(rounded > 127 ? 127 : rounded < -127 ? -127 : rounded));
        } else {
            q[k] = to_e4m3(v);
        }
    }
}

}  // namespace
