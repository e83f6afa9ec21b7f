// The scales of a group's 16 rows, as vectors of rows: w = (u - zero) * scale + low, and of a table table[u] * scale.
#pragma once
#include "layout.h"
#include "vec.h"

namespace {

#if defined(AP_DOTPROD)
AP_INLINE int8x16_t as_signed(uint8x16_t u) { return vreinterpretq_s8_u8(veorq_u8(u, vdupq_n_u8(128))); }  // u - 128
#endif

template <int KIND> constexpr int kCentre = KIND == AP_INT8 ? 128 : KIND == AP_Q6_K ? 32 : KIND == AP_INT3 ? 4 : 8;
template <int KIND> constexpr bool kCodes = KIND == AP_INT4 || KIND == AP_INT3;  // which may have an offset
template <int KIND> constexpr int64_t kRowsBytes = KIND == AP_INT8 ? 16 : KIND == AP_INT3 ? 6 : 8;  // of 16 rows, a k
template <int KIND>
constexpr int kHeaderGroups = KIND == AP_Q4_K   ? 8
                              : KIND == AP_Q6_K ? 16
                                                : 1;  // Layout::header_groups
constexpr int64_t kBlockVectors = kBlockRows / kLanes;

// Vector v of the block's 16 scales or minimums at p.
AP_INLINE vf load_values(const uint8_t* p, bool half, int64_t v) {
    if (half) return load_half(p + v * kLanes * 2);
    vf out;
    memcpy(&out, p + v * kLanes * 4, sizeof out);
    return out;
}

// The same for scales in e4m3: their bits, shifted into a float16, give a 256th of the value.
AP_INLINE vf load_e4m3(const uint8_t* p, int64_t v) {
    uint16_t half[kLanes];
    for (int64_t i = 0; i < kLanes; i++) {
        const int byte = p[v * kLanes + i];
        half[i] = static_cast<uint16_t>((byte & 128) << 8 | (byte & 127) << 7);
    }
    return load_half(reinterpret_cast<const uint8_t*>(half)) * splat(256);
}

// The six-bit scales (shift 0) or minimums (shift 1) of group `at` of a Q4_K superblock.
AP_INLINE vf six_bits(const uint8_t* header, int64_t at, int64_t v, int shift) {
    const uint8_t* p = header + kBlockRows * 4 + v * kLanes;
    const vi low = bytes(p + at * kBlockRows) >> (4 * shift) & 15;
    const vi high = bytes(p + (8 + at / 2) * kBlockRows) >> (at % 2 * 4 + 2 * shift) & 3;
    return __builtin_convertvector(low | high << 4, vf);
}

template <int KIND> AP_INLINE vf group_scale(const ap_linear& w, const uint8_t* header, int64_t at, int64_t v) {
    if (KIND == AP_TABLE && w.half_scales == 2) return load_e4m3(header, v);
    const vf d = load_values(header, KIND == AP_Q4_K || KIND == AP_Q6_K || w.half_scales, v);
    if (KIND == AP_Q4_K) return d * six_bits(header, at, v, 0);
    if (KIND != AP_Q6_K) return d;
    const vi scale = (bytes(header + (2 + at) * kBlockRows + v * kLanes) ^ 128) - 128;  // int8
    return d * __builtin_convertvector(scale, vf);
}

// Whether w is more than (u - centre) * scale.
template <int KIND> AP_INLINE bool has_middle(const ap_linear& w) {
    return KIND == AP_Q4_K || (kCodes<KIND> && w.offset);
}

template <int KIND> AP_INLINE bool has_low(const ap_linear& w) {
    return KIND == AP_Q4_K || (kCodes<KIND> && w.offset == AP_MINIMUM);
}

template <int KIND> AP_INLINE vf group_low(const ap_linear& w, const uint8_t* header, int64_t at, int64_t v) {
    if (KIND == AP_Q4_K) return -(load_values(header + kBlockRows * 2, true, v) * six_bits(header, at, v, 1));
    if (!has_low<KIND>(w)) return splat(0);
    return load_values(header + kBlockRows * (w.half_scales ? 2 : 4), w.half_scales, v);
}

template <int KIND> AP_INLINE vf group_zero(const ap_linear& w, const uint8_t* header, int64_t v) {
    if (has_low<KIND>(w)) return splat(0);
    if (!kCodes<KIND> || w.offset != AP_ZERO_POINT) return splat(kCentre<KIND>);
    const uint8_t* zeros = header + kBlockRows * (w.half_scales ? 2 : 4);
    return __builtin_convertvector(bytes(zeros + v * kLanes), vf);
}

// What w is more than (u - centre) * scale: two terms that do not cancel each other. Exact for zero points and half
// scales.
template <int KIND>
AP_INLINE vf group_middle(const ap_linear& w, const uint8_t* header, int64_t at, int64_t v, vf scale) {
    return fma(splat(kCentre<KIND>) - group_zero<KIND>(w, header, v), scale, group_low<KIND>(w, header, at, v));
}

// All 16 rows of a group.
struct Group {
    float scale[16], zero[16], low[16];
};

template <int KIND> void read_group(const ap_linear& w, const Place& p, Group& g) {
    for (int64_t v = 0; v < kBlockVectors; v++) {
        store(g.scale + v * kLanes, group_scale<KIND>(w, p.header, p.at, v));
        store(g.zero + v * kLanes, group_zero<KIND>(w, p.header, v));
        store(g.low + v * kLanes, group_low<KIND>(w, p.header, p.at, v));
    }
}

inline Group group_at(const ap_linear& w, const Place& p) {
    Group g;
    switch (w.kind) {
        case AP_INT3: read_group<AP_INT3>(w, p, g); break;
        case AP_INT4: read_group<AP_INT4>(w, p, g); break;
        case AP_TABLE: read_group<AP_TABLE>(w, p, g); break;
        case AP_Q4_K: read_group<AP_Q4_K>(w, p, g); break;
        case AP_Q6_K: read_group<AP_Q6_K>(w, p, g); break;
        default: read_group<AP_INT8>(w, p, g);
    }
    return g;
}

// The 16 values of a table, to be looked up by the low 4 bits of each lane.
#if AP_LANES == 16
typedef vf Table;
AP_INLINE Table table_of(const ap_linear& w) { return load(w.table); }
AP_INLINE vf look_up(Table t, vi codes) { return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes), t); }
#elif AP_LANES == 8
struct Table {
    vf low, high;
};
AP_INLINE Table table_of(const ap_linear& w) { return {load(w.table), load(w.table + 8)}; }
AP_INLINE vf look_up(Table t, vi codes) {
    const auto index = reinterpret_cast<__m256i>(codes);
    const __m256 upper = reinterpret_cast<__m256>(codes << 28);  // its sign chooses
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, index), _mm256_permutevar8x32_ps(t.high, index), upper);
}
#else
typedef const float* Table;
AP_INLINE Table table_of(const ap_linear& w) { return w.table; }
AP_INLINE vf look_up(Table t, vi codes) {
    return vf{t[codes[0] & 15], t[codes[1] & 15], t[codes[2] & 15], t[codes[3] & 15]};
}
#endif

}  // namespace
