// Rows of Q4_K and Q6_K blocks as a file holds them, to a block of the pack (layout.h) and back, bit for bit.
#pragma once
#include <cstring>

#include "layout.h"

namespace {

constexpr int64_t kBytesQ4K = 144, kBytesQ6K = 210;  // of a superblock in a file

inline int64_t row_bytes_of(const ap_linear& w) {
    if (w.kind == AP_Q4_K) return w.k / kSuperblock * kBytesQ4K;
    if (w.kind == AP_Q6_K) return w.k / kSuperblock * kBytesQ6K;
    if (w.kind == AP_INT3) return w.k / 8 * 3;
    return w.kind == AP_INT8 || w.kind == AP_W8A8 ? w.k : w.k / 2;
}

inline void put_nibble(uint8_t* weights, int64_t row, int64_t k, int nibble) {
    uint8_t& byte = weights[(k / 8 * kBlockRows + row) * 4 + k % 4];
    byte = static_cast<uint8_t>(byte | nibble << (k / 4 % 2 * 4));
}

// Bits [from, from + count) of a byte, moved to bit `to`.
inline int bits(uint8_t byte, int from, int count, int to) { return (byte >> from & ((1 << count) - 1)) << to; }

// d, dmin, 12 bytes of scales and minimums, 128 bytes of nibbles.
inline void pack_q4_k(const uint8_t* file, const Layout& l, uint8_t* header, int64_t row) {
    memcpy(header + 2 * row, file, 2);
    memcpy(header + 2 * (kBlockRows + row), file + 2, 2);
    const uint8_t* s = file + 4;
    uint8_t *low = header + 4 * kBlockRows + row, *high = low + 8 * kBlockRows;
    for (int j = 0; j < 8; j++) {
        const int scale = j < 4 ? s[j] & 63 : bits(s[j + 4], 0, 4, 0) | bits(s[j - 4], 6, 2, 4);
        const int minimum = j < 4 ? s[j + 4] & 63 : bits(s[j + 4], 4, 4, 0) | bits(s[j], 6, 2, 4);
        low[j * kBlockRows] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
        uint8_t& two = high[j / 2 * kBlockRows];
        two = static_cast<uint8_t>(two | ((scale >> 4) | (minimum >> 4) << 2) << (j % 2 * 4));
    }
    for (int64_t k = 0; k < kSuperblock; k++) {
        const uint8_t byte = file[16 + k / 64 * 32 + k % 32];
        put_nibble(header + l.header + k / 32 * l.codes, row, k % 32, k / 32 % 2 ? byte >> 4 : byte & 15);
    }
}

inline void unpack_q4_k(const uint8_t* header, const Layout& l, uint8_t* file, int64_t row) {
    memset(file, 0, kBytesQ4K);
    memcpy(file, header + 2 * row, 2);
    memcpy(file + 2, header + 2 * (kBlockRows + row), 2);
    uint8_t* s = file + 4;
    const uint8_t *low = header + 4 * kBlockRows + row, *high = low + 8 * kBlockRows;
    for (int j = 0; j < 8; j++) {
        const uint8_t four = low[j * kBlockRows], two = high[j / 2 * kBlockRows];
        const int scale = bits(four, 0, 4, 0) | bits(two, j % 2 * 4, 2, 4),
                  minimum = bits(four, 4, 4, 0) | bits(two, j % 2 * 4 + 2, 2, 4);
        if (j < 4) {
            s[j] = static_cast<uint8_t>(s[j] | scale);
            s[j + 4] = static_cast<uint8_t>(s[j + 4] | minimum);
        } else {
            s[j + 4] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
            s[j - 4] = static_cast<uint8_t>(s[j - 4] | scale >> 4 << 6);
            s[j] = static_cast<uint8_t>(s[j] | minimum >> 4 << 6);
        }
    }
    for (int64_t k = 0; k < kSuperblock; k++) {
        const int nibble = code_at(AP_Q4_K, header + l.header + k / 32 * l.codes, row, k % 32);
        uint8_t& byte = file[16 + k / 64 * 32 + k % 32];
        byte = static_cast<uint8_t>(byte | nibble << (k / 32 % 2 * 4));
    }
}

// Where a file keeps value k of a Q6_K superblock: the byte and the shift of its low 4 bits and of its upper 2.
struct SixBits {
    int64_t low, low_shift, high, high_shift;
};

inline SixBits six_bits_of(int64_t k) {
    const int64_t half = k / 128, quarter = k % 128 / 32, l = k % 32;
    return {64 * half + quarter % 2 * 32 + l, quarter / 2 * 4, 128 + 32 * half + l, 2 * quarter};
}

// 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d.
inline void pack_q6_k(const uint8_t* file, const Layout& l, uint8_t* header, int64_t row) {
    memcpy(header + 2 * row, file + 208, 2);
    for (int64_t j = 0; j < 16; j++) header[(2 + j) * kBlockRows + row] = file[192 + j];
    for (int64_t k = 0; k < kSuperblock; k++) {
        const SixBits at = six_bits_of(k);
        uint8_t *codes = header + l.header + k / 16 * l.codes, *upper = codes + (2 * kBlockRows + row) * 4 + k % 4;
        put_nibble(codes, row, k % 16, file[at.low] >> at.low_shift & 15);
        *upper = static_cast<uint8_t>(*upper | (file[at.high] >> at.high_shift & 3) << (k % 16 / 4 * 2));
    }
}

inline void unpack_q6_k(const uint8_t* header, const Layout& l, uint8_t* file, int64_t row) {
    memset(file, 0, kBytesQ6K);
    memcpy(file + 208, header + 2 * row, 2);
    for (int64_t j = 0; j < 16; j++) file[192 + j] = header[(2 + j) * kBlockRows + row];
    for (int64_t k = 0; k < kSuperblock; k++) {
        const SixBits at = six_bits_of(k);
        const int u = code_at(AP_Q6_K, header + l.header + k / 16 * l.codes, row, k % 16);
        file[at.low] = static_cast<uint8_t>(file[at.low] | (u & 15) << at.low_shift);
        file[at.high] = static_cast<uint8_t>(file[at.high] | u >> 4 << at.high_shift);
    }
}

inline void pack_superblocks(const ap_linear& w, const Layout& l, const uint8_t* file, uint8_t* block, int64_t row) {
    for (int64_t i = 0; i < w.k / kSuperblock; i++, block += l.stride) {
        if (w.kind == AP_Q4_K) pack_q4_k(file + i * kBytesQ4K, l, block, row);
        else pack_q6_k(file + i * kBytesQ6K, l, block, row);
    }
}

inline void unpack_superblocks(const ap_linear& w, const Layout& l, const uint8_t* block, uint8_t* file, int64_t row) {
    for (int64_t i = 0; i < w.k / kSuperblock; i++, block += l.stride) {
        if (w.kind == AP_Q4_K) unpack_q4_k(block, l, file + i * kBytesQ4K, row);
        else unpack_q6_k(block, l, file + i * kBytesQ6K, row);
    }
}

}  // namespace
