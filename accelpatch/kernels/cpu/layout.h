// Where a pack keeps what. Rows are taken in blocks of 16. A block holds its groups of k one after the other, and a
// group is
//   scale[16] (float32 or float16), minimum[16] where the format has one, then the weights:
//   int8 and W8A8: [k / 4][16 rows][4 k] as q + 128: one 64-byte load is the unsigned operand of a VNNI product of 16
//   rows and 4 k; int4: [k / 8][16 rows][4 bytes]: the low nibbles are the first 4 k, the high nibbles the next 4.
// So a thread reads a block as one stream of bytes. Rows and k beyond the weight's own are stored as zeros with scale
// zero.
#pragma once
#include <cmath>

#include "accelpatch_cpu.h"

constexpr int64_t kBlockRows = AP_ROWS, kMaxBatch = AP_MAX_BATCH;
constexpr int64_t kLongestW8A8 = 132104;  // k up to which 128 * 127 * k is an int32

namespace {

struct Layout {
    int64_t blocks, groups, group, header, group_bytes, block_bytes;
    int64_t part;  // where the minimums begin within a header
};

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline bool layout_allows(const ap_linear& w) {
    const int64_t most = int64_t{1} << 31;
    if (w.n < 1 || w.k < 1 || w.n > most || w.k > most || w.group < 1) return false;
    if (w.kind == AP_DENSE) return true;
    if (w.kind == AP_W8A8)
        return w.group == w.k && w.k <= kLongestW8A8 && !w.half_scales && w.input_scale >= 0 &&
               w.input_scale < INFINITY;
    if (w.kind != AP_INT8 && w.kind != AP_INT4) return false;
    return w.group == w.k || (w.group % 32 == 0 && w.k % w.group == 0);
}

inline Layout layout_of(const ap_linear& w) {
    Layout l;
    const bool four = w.kind == AP_INT4;
    l.blocks = (w.n + kBlockRows - 1) / kBlockRows;
    l.groups = w.k / w.group;
    l.group = round_up(w.group, four ? 8 : 4);
    l.part = kBlockRows * (w.half_scales ? 2 : 4);
    l.header = l.part * (four && w.minimum ? 2 : 1);
    l.group_bytes = l.header + l.group * kBlockRows / (four ? 2 : 1);
    l.block_bytes = l.groups * l.group_bytes;
    return l;
}

// A weight and its layout. AP_DENSE has the same blocks of rows; they hold nothing but rows.
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

// The integer behind row `row` of a block and `k` of a group whose weights begin at `p`.
inline int int8_at(const uint8_t* p, int64_t row, int64_t k) { return p[(k / 4 * kBlockRows + row) * 4 + k % 4] - 128; }
inline int int4_at(const uint8_t* p, int64_t row, int64_t k) {
    const uint8_t byte = p[(k / 8 * kBlockRows + row) * 4 + k % 4];
    return k / 4 % 2 ? byte >> 4 : byte & 15;
}

}  // namespace
