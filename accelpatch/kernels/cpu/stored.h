// Weights that are read as a checkpoint stores them, a row after the other: the blocks of GGUF (layouts/gguf_blocks.py
// has their bytes) and e4m3 with a scale for each 128 values of a row. A thread makes a block's values float in its
// core's cache, as torch would, and multiplies all tokens with them.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int64_t kStoredDepth = 256;  // values that are made float at a time, at most

constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

AP_INLINE float half_at(const uint8_t* p) { return from_half(static_cast<uint16_t>(p[0] | p[1] << 8)); }

// 32 nibbles of 16 bytes, the low ones first, with a fifth bit each where there are any, times d and plus m.
AP_INLINE void nibbles(const uint8_t* q, const uint8_t* fifth, int less, float d, const float* m, float* out) {
    uint32_t bits = 0;
    if (fifth) memcpy(&bits, fifth, 4);
    for (int i = 0; i < 16; i++) {
        const int low = (q[i] & 15) + static_cast<int>(bits >> i & 1) * 16 - less;
        const int high = (q[i] >> 4) + static_cast<int>(bits >> (i + 16) & 1) * 16 - less;
        out[i] = d * static_cast<float>(low), out[i + 16] = d * static_cast<float>(high);
    }
    for (int i = 0; m && i < 32; i++) out[i] += *m;
}

AP_INLINE void iq4(const uint8_t* q, float d, float* out) {
    for (int i = 0; i < 16; i++) out[i] = d * kIq4[q[i] & 15], out[i + 16] = d * kIq4[q[i] >> 4];
}

// The 6-bit scale and minimum of group j in the 12 bytes of Q4_K and Q5_K.
AP_INLINE void six_bits(const uint8_t* s, int j, int* scale, int* least) {
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *least = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
}

inline void q2_k(const uint8_t* b, float* out) {
    const float d = half_at(b + 80), least = half_at(b + 82);
    for (int j = 0; j < 16; j++) {
        const float scale = d * static_cast<float>(b[j] & 15), low = least * static_cast<float>(b[j] >> 4);
        const uint8_t* q = b + 16 + j / 8 * 32 + j % 2 * 16;
        for (int i = 0; i < 16; i++) out[16 * j + i] = scale * static_cast<float>(q[i] >> (j / 2 % 4 * 2) & 3) - low;
    }
}

inline void q3_k(const uint8_t* b, float* out) {
    const float d = half_at(b + 108);
    const uint8_t* s = b + 96;
    for (int j = 0; j < 16; j++) {
        const int six = (s[j % 8] >> (j / 8 * 4) & 15) + 16 * (s[8 + j % 4] >> (j / 4 * 2) & 3) - 32;
        const float scale = d * static_cast<float>(six);
        const uint8_t *q = b + 32 + j / 8 * 32 + j % 2 * 16, *third = b + j % 2 * 16;
        for (int i = 0; i < 16; i++)
            out[16 * j + i] =
                scale * static_cast<float>((q[i] >> (j / 2 % 4 * 2) & 3) + 4 * (third[i] >> (j / 2) & 1) - 4);
    }
}

inline void q4_or_q5_k(const uint8_t* b, bool five, float* out) {
    const float d = half_at(b), least = half_at(b + 2);
    const uint8_t *fifth = b + 16, *codes = b + (five ? 48 : 16);
    for (int j = 0; j < 8; j++) {
        int scale = 0, low = 0;
        six_bits(b + 4, j, &scale, &low);
        const float by = d * static_cast<float>(scale), less = least * static_cast<float>(low);
        const uint8_t* q = codes + j / 2 * 32;
        for (int i = 0; i < 32; i++) {
            const int more = five ? fifth[i] >> j & 1 : 0;
            out[32 * j + i] = by * static_cast<float>((q[i] >> (j % 2 * 4) & 15) + 16 * more) - less;
        }
    }
}

inline void q6_k(const uint8_t* b, float* out) {
    const float d = half_at(b + 208);
    for (int j = 0; j < 16; j++) {
        const float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + j]));
        const int place = j % 8 * 16;
        const uint8_t *low = b + j / 8 * 64 + place % 64, *high = b + 128 + j / 8 * 32 + place % 32;
        for (int i = 0; i < 16; i++)
            out[16 * j + i] = scale * static_cast<float>((low[i] >> (place / 64 * 4) & 15) +
                                                         16 * (high[i] >> (place / 32 * 2) & 3) - 32);
    }
}

inline void iq4_xs(const uint8_t* b, float* out) {
    const float d = half_at(b);
    for (int j = 0; j < 8; j++) {
        const int six = (b[4 + j / 2] >> (j % 2 * 4) & 15) + 16 * (b[2 + j / 4] >> (j % 4 * 2) & 3) - 32;
        iq4(b + 8 + 16 * j, d * static_cast<float>(six), out + 32 * j);
    }
}

// e4m3fn, exactly, times a scale; its two NaNs are NaN. No subnormal floats are needed on the way.
inline void stored_e4m3(const uint8_t* codes, float scale, int64_t count, float* out) {
    for (int64_t k = 0; k < count; k += kLanes) {
        const int64_t left = count - k < kLanes ? count - k : kLanes;
        vu bytes = {};
        memcpy(&bytes, codes + k, static_cast<size_t>(left));
        const vi code = __builtin_convertvector(bytes, vi), below = code & 127;
        const vi small = as_int(__builtin_convertvector(below, vf) * 0x1p-9f), usual = (below << 20) + (120 << 23);
        vi bits = below < 8 ? small : usual;
        bits = below == 127 ? vi{} + 0x7fc00000 : bits;
        store_part(out + k, as_float(bits | (code & 128) << 24) * scale, left);
    }
}

// Values and bytes of a block of a form.
struct StoredBlock {
    int64_t values, bytes;
};
AP_INLINE StoredBlock stored_block(int form) {
    constexpr StoredBlock blocks[] = {{32, 34}, {32, 18}, {32, 20}, {32, 22}, {32, 24}, {256, 84}, {256, 110},
        {256, 176}, {32, 18}, {256, 136}, {256, 144}, {256, 210}, {128, 128}};
    return blocks[form];
}

AP_INLINE int64_t stored_row_bytes(const ap_stored& w) {
    const StoredBlock block = stored_block(w.form);
    return w.form == AP_STORED_E4M3 ? w.k : w.k / block.values * block.bytes;
}

// The values of one block, `count` of them (fewer than it has at the end of a row of e4m3).
inline void stored_values(int form, const uint8_t* b, float scale, int64_t count, float* out) {
    float m = 0;
    switch (form) {
        case AP_STORED_Q8_0:
            for (int i = 0; i < 32; i++) out[i] = half_at(b) * static_cast<float>(static_cast<int8_t>(b[2 + i]));
            return;
        case AP_STORED_Q4_0: return nibbles(b + 2, nullptr, 8, half_at(b), nullptr, out);
        case AP_STORED_Q4_1: m = half_at(b + 2); return nibbles(b + 4, nullptr, 0, half_at(b), &m, out);
        case AP_STORED_Q5_0: return nibbles(b + 6, b + 2, 16, half_at(b), nullptr, out);
        case AP_STORED_Q5_1: m = half_at(b + 2); return nibbles(b + 8, b + 4, 0, half_at(b), &m, out);
        case AP_STORED_Q2_K: return q2_k(b, out);
        case AP_STORED_Q3_K: return q3_k(b, out);
        case AP_STORED_Q4_K: return q4_or_q5_k(b, false, out);
        case AP_STORED_Q5_K: return q4_or_q5_k(b, true, out);
        case AP_STORED_Q6_K: return q6_k(b, out);
        case AP_STORED_IQ4_NL: return iq4(b + 2, half_at(b), out);
        case AP_STORED_IQ4_XS: return iq4_xs(b, out);
        case AP_STORED_E4M3: return stored_e4m3(b, scale, count, out);
    }
}

// A row's values from `first` on, at most kStoredDepth of them; returns how many.
inline int64_t stored_part(const ap_stored& w, int64_t row, int64_t first, float* out) {
    const StoredBlock block = stored_block(w.form);
    const uint8_t* data = w.data + row * stored_row_bytes(w);
    const int64_t last = first + kStoredDepth < w.k ? first + kStoredDepth : w.k;
    for (int64_t k = first; k < last; k += block.values) {
        const int64_t count = last - k < block.values ? last - k : block.values;
        const float* scale = w.scale ? w.scale + row * w.scales + (w.scales > 1 ? k / 128 : 0) : nullptr;
        stored_values(w.form, data + k / block.values * block.bytes, scale ? *scale : 1.0f, count, out + (k - first));
    }
    return last - first;
}

// total[m] += values . x[m]
inline void stored_dot(
    const float* values, int64_t count, const float* x, int64_t stride, int64_t tokens, double* total) {
    for (int64_t m = 0; m < tokens; m++) {
        const float* row = x + m * stride;
        vf dot[4] = {};
        int64_t k = 0;
        for (; k + 4 * kLanes <= count; k += 4 * kLanes)
            for (int i = 0; i < 4; i++) dot[i] = fma(load(values + k + i * kLanes), load(row + k + i * kLanes), dot[i]);
        for (; k < count; k += kLanes) {
            const int64_t left = count - k < kLanes ? count - k : kLanes;
            dot[0] = fma(load_part(values + k, left), load_part(row + k, left), dot[0]);
        }
        total[m] += sum((dot[0] + dot[1]) + (dot[2] + dot[3]));
    }
}

// Rows of the weight: their products with the tokens, or without tokens their values.
inline void stored_job(void* argument, ThreadPool* pool, int self) {
    const auto& c = *static_cast<const StoredCall*>(argument);
    const ap_stored& w = *c.w;
    constexpr int64_t rows = 8;  // that a thread takes at a time
    WorkCursor cursor = {(w.n + rows - 1) / rows};
    for (int64_t item; (item = pool_next(pool, self, &cursor)) >= 0;) {
        const int64_t last = (item + 1) * rows < w.n ? (item + 1) * rows : w.n;
        for (int64_t row = item * rows; row < last; row++) {
            float values[kStoredDepth];
            double sums[AP_MAX_STORED] = {};
            for (int64_t k = 0; k < w.k;) {
                const int64_t count = stored_part(w, row, k, c.x ? values : c.y + row * w.k + k);
                if (c.x) stored_dot(values, count, c.x + k, c.x_stride, c.m, sums);
                k += count;
            }
            for (int64_t m = 0; m < c.m && c.x; m++)
                c.y[m * c.y_stride + row] = static_cast<float>(sums[m] + (w.bias ? w.bias[row] : 0.0f));
        }
    }
}

}  // namespace
