// The layout of a packed weight. Rows come in blocks of 16. A block has its groups along k one after the other, and a
// group is
//   scale[16] (float32 or float16), minimum[16] or zero point[16] (a byte) where the format has one, then the weights:
//   int8 and W8A8: [k / 4][16 rows][4 k] as q + 128: one 64-byte load is the unsigned operand of a VNNI product of 16
//   rows and 4 k; int4 and tables: [k / 8][16 rows][4 bytes]: the low nibbles are the first 4 k, the high nibbles the
//   next 4. int3: for each 32 k, [2][16 rows][4 bytes]: the low 2 bits of k i, 4 + i, 8 + i and 12 + i of a half in
//   byte i; then [16 rows][4 bytes]: the upper bits of k i, 4 + i, ..., 28 + i in byte i.
// Q4_K and Q6_K: the groups of a superblock of 256 k share a header.
//   Q4_K: d[16], dmin[16] (float16), then bytes [8 groups][16]: the low 4 bits of a scale and of a minimum; [4][16]:
//   the upper 2 bits of the scale and the minimum of two groups; then the weights of 8 groups as of int4. Q6_K: d[16]
//   (float16), scale[16 groups][16] (int8), then for each group the low 4 bits as of int4 and [16 rows][4 bytes]: the
//   upper 2 bits of k i, 4 + i, 8 + i and 12 + i in byte i.
// NVFP4: the scales of a table's group are bytes of e4m3, and a block ends with the factors of its rows, float64[16].
// So a thread reads a block as one contiguous stream. Rows and columns beyond the weight's own are padded with zeros,
// whose scale is zero.
#pragma once
#include <cmath>
#include <cstring>

#include "accelpatch_cpu.h"

constexpr int64_t kBlockRows = AP_ROWS, kMaxBatch = AP_MAX_BATCH;
constexpr int64_t kLongestW8A8 = 132104;  // k up to which 128 * 127 * k is an int32
constexpr int64_t kSuperblock = 256;

namespace {

struct Layout {
    int64_t blocks, groups, group, block_bytes;
    int64_t header, offsets;       // bytes of a header, and where the minimums or zero points begin within it
    int64_t header_groups, codes;  // groups that share a header, and bytes of the codes of each
    int64_t stride;                // bytes from one header to the next
};

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline bool has_superblocks(const ap_linear& w) { return w.kind == AP_Q4_K || w.kind == AP_Q6_K; }

inline bool has_codes(int32_t kind) { return kind == AP_INT4 || kind == AP_INT3; }  // those with an offset
// Whether a table's scales are e4m3, and each row has a factor as well.
inline bool is_nvfp4(const ap_linear& w) { return w.kind == AP_TABLE && w.half_scales == 2; }

inline bool layout_allows(const ap_linear& w) {
    const int64_t most = int64_t{1} << 31;
    if (w.n < 1 || w.k < 1 || w.n > most || w.k > most || w.group < 1) return false;
    if (w.kind == AP_DENSE) return true;
    if (w.half_scales < 0 || w.half_scales > (w.kind == AP_TABLE ? 2 : 1)) return false;
    if (w.offset < AP_NO_OFFSET || w.offset > (has_codes(w.kind) ? AP_ZERO_POINT : AP_NO_OFFSET)) return false;
    if (w.kind == AP_W8A8)
        return w.group == w.k && w.k <= kLongestW8A8 && !w.half_scales && !w.order && w.input_scale >= 0 &&
               w.input_scale < INFINITY;
    if (has_superblocks(w)) return w.half_scales && w.group == (w.kind == AP_Q4_K ? 32 : 16) && w.k % kSuperblock == 0;
    if (w.kind == AP_TABLE) return w.group % 16 == 0 && w.k % w.group == 0;
    if (w.kind == AP_INT3) return w.group % 32 == 0 && w.k % w.group == 0;
    if (w.kind != AP_INT8 && w.kind != AP_INT4) return false;
    return w.group == w.k || (w.group % 16 == 0 && w.k % w.group == 0);
}

// Whether a kernel may read the weight: its pointers are set, and its order has only columns of x.
inline bool readable(const ap_linear& w) {
    if (!w.data || !layout_allows(w) || (w.kind == AP_TABLE && !w.table)) return false;
    bool inside = true;
    for (int64_t j = 0; j < w.k && w.order; j++) inside &= w.order[j] >= 0 && w.order[j] < w.k;
    return inside;
}

inline Layout layout_of(const ap_linear& w) {
    Layout l;
    const bool bytes = w.kind == AP_INT8 || w.kind == AP_W8A8;
    const int64_t bits = bytes ? 8 : w.kind == AP_Q6_K ? 6 : w.kind == AP_INT3 ? 3 : 4;
    l.blocks = (w.n + kBlockRows - 1) / kBlockRows;
    l.groups = w.k / w.group;
    l.group = round_up(w.group, bytes ? 4 : 8);
    l.codes = l.group * kBlockRows * bits / 8;
    l.offsets = kBlockRows * (is_nvfp4(w) ? 1 : w.half_scales ? 2 : 4);
    l.header = l.offsets + (w.offset == AP_MINIMUM ? l.offsets : w.offset == AP_ZERO_POINT ? kBlockRows : 0);
    l.header_groups = 1;
    if (w.kind == AP_Q4_K) l.header_groups = 8, l.header = kBlockRows * (4 + 12);
    if (w.kind == AP_Q6_K) l.header_groups = 16, l.header = kBlockRows * (2 + 16);
    l.stride = l.header + l.header_groups * l.codes;
    l.block_bytes = l.groups / l.header_groups * l.stride + (is_nvfp4(w) ? kBlockRows * 8 : 0);
    return l;
}

// A weight and its layout. Of AP_DENSE only the number of blocks of rows is set.
struct Weight {
    ap_linear w;
    Layout l;
};

inline Weight weight_of(const ap_linear& w) {
    Weight out = {w, {}};
    if (w.kind != AP_DENSE && w.k > 0) out.l = layout_of(w);
    out.l.blocks = (w.n + kBlockRows - 1) / kBlockRows;
    return out;
}

inline int64_t rows_in(const Weight& w, int64_t b) {
    const int64_t left = w.w.n - b * kBlockRows;
    return left < kBlockRows ? left : kBlockRows;
}

// The factors of a block's rows.
struct Factors {
    double of[kBlockRows];
};
inline Factors factors_of(const Layout& l, const uint8_t* block) {
    Factors factors;
    memcpy(&factors, block + l.block_bytes - sizeof factors, sizeof factors);
    return factors;
}

// Group g of a block: its header, its place among the groups of that header, and its weights.
struct Place {
    const uint8_t* header;
    int64_t at;
    const uint8_t* codes;
};

inline Place place_of(const Layout& l, const uint8_t* block, int64_t g) {
    const uint8_t* header = block + g / l.header_groups * l.stride;
    return {header, g % l.header_groups, header + l.header + g % l.header_groups * l.codes};
}

// The unsigned code of row `row` of a block at `k` of a group, whose codes begin at `p`.
inline int code_at(int32_t kind, const uint8_t* p, int64_t row, int64_t k) {
    if (kind == AP_INT8 || kind == AP_W8A8) return p[(k / 4 * kBlockRows + row) * 4 + k % 4];
    if (kind == AP_INT3) {
        const uint8_t* word = p + k / 32 * 12 * kBlockRows + row * 4 + k % 4;
        return (word[k / 16 % 2 * 4 * kBlockRows] >> (k / 4 % 4 * 2) & 3) | (word[8 * kBlockRows] >> (k / 4 % 8) & 1)
                                                                                << 2;
    }
    const uint8_t byte = p[(k / 8 * kBlockRows + row) * 4 + k % 4];
    const int low = k / 4 % 2 ? byte >> 4 : byte & 15;
    if (kind != AP_Q6_K) return low;
    return low | (p[(2 * kBlockRows + row) * 4 + k % 4] >> (k / 4 * 2) & 3) << 4;
}

}  // namespace
