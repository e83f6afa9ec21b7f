// Sixteen rows of weights times M tokens in float: what AVX2 and portable machines run, and dense weights everywhere.
#pragma once
#include "activations.h"
#include "scales.h"

namespace {

constexpr int kRows = kLanes / 4;  // a vector holds 4 k of kRows rows

AP_INLINE vf four_times(const float* scale) {  // each row's scale, four times
    float lane[kLanes];
    for (int i = 0; i < kLanes; i++) lane[i] = scale[i / 4];
    return load(lane);
}

AP_INLINE vf repeat(const float* x) {  // the same 4 k for every row of a vector
#if AP_LANES == 8
    return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x));
#endif
    float lane[kLanes];
    for (int i = 0; i < kLanes; i++) lane[i] = x[i % 4];
    return load(lane);
}

// k summed in one chain: sums of sums lose less than one long sum. With minimums it is whole blocks of activations,
// whose sums are known.
constexpr int64_t kChain = 32, kBlockChain = 128;

template <int M, int R> struct Sums {
    vf dot[R][M];
};

// dot += w * x for R vectors of rows, 4 k and M tokens
template <int M, int R> AP_INLINE void multiply(Sums<M, R>& s, const vf* w, const float* x, int64_t stride) {
    vf v[M];
    for (int m = 0; m < M; m++) v[m] = repeat(x + m * stride);
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) s.dot[r][m] = fma(w[r], v[m], s.dot[r][m]);
}

// Codes less their centre. ZERO: of those with an offset, which is then the zero point, so that no second term cancels
// the first.
template <int KIND, bool ZERO> AP_INLINE vf centred(vi u, vi zero, const Table& table) {
    if constexpr (KIND == AP_TABLE) return look_up(table, u);
    else if constexpr (ZERO) return __builtin_convertvector(u - zero, vf);
    else return __builtin_convertvector(u - kCentre<KIND>, vf);
}

// Of AP_INT3: 8 vectors of 4 k for each 32 k.
template <int M, int R, int KIND, bool ZERO>
AP_INLINE void multiply_three(Sums<M, R>& s, const uint8_t* w, const vi* zero, const Table& table, const float* x,
    int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k += 32, w += 192) {
        for (int v = 0; v < 8; v++) {
            vf made[R];
            for (int r = 0; r < R; r++) {
                const uint8_t* p = w + r * kRows * 4;
                const vi code = (bytes(p + v / 4 * 64) >> (v % 4 * 2) & 3) | (bytes(p + 128) >> v & 1) << 2;
                made[r] = centred<KIND, ZERO>(code, zero[r], table);
            }
            multiply<M, R>(s, made, x + k + 4 * v, stride);
        }
    }
}

template <int M, int R, int KIND, bool ZERO>
AP_INLINE void multiply_chain(Sums<M, R>& s, const uint8_t* w, const float* zeros, const Table& table, const float* x,
    int64_t stride, int64_t count) {
    vi zero[R] = {};
    if constexpr (ZERO)
        for (int r = 0; r < R; r++) zero[r] = __builtin_convertvector(four_times(zeros + r * kRows), vi);
    if constexpr (KIND == AP_INT3) return multiply_three<M, R, KIND, ZERO>(s, w, zero, table, x, stride, count);
    for (int64_t k = 0; k < count; k += KIND == AP_INT8 ? 4 : 8) {
        vf low[R], high[R];
        for (int r = 0; r < R; r++) {
            const uint8_t* p = w + (KIND == AP_INT8 ? k * 16 : k * 8) + r * kRows * 4;
            const vi q = bytes(p);
            vi first = KIND == AP_INT8 || KIND == AP_TABLE ? q : q & 15, second = q >> 4;
            if (KIND == AP_Q6_K) {  // a group of 16: k is 0 or 8
                const vi upper = bytes(p + 128 - k * 8) >> static_cast<int>(k / 2);
                first |= (upper & 3) << 4;
                second |= (upper & 12) << 2;
            }
            low[r] = centred<KIND, ZERO>(first, zero[r], table);
            if (KIND != AP_INT8) high[r] = centred<KIND, ZERO>(second, zero[r], table);
        }
        multiply<M, R>(s, low, x + k, stride);
        if (KIND != AP_INT8) multiply<M, R>(s, high, x + k + 4, stride);
    }
}

// What a group is worth to the sums of R vectors of rows and M tokens.
struct Rows {
    float scale[16], middle[16], zero[16];
};

template <int KIND> AP_INLINE void read_rows(const ap_linear& w, const Place& p, Rows& rows) {
    for (int64_t v = 0; v < kBlockVectors; v++) {
        const vf scale = group_scale<KIND>(w, p.header, p.at, v);
        store(rows.scale + v * kLanes, scale);
        if (has_low<KIND>(w)) store(rows.middle + v * kLanes, group_middle<KIND>(w, p.header, p.at, v, scale));
        if (kCodes<KIND> && w.offset == AP_ZERO_POINT) store(rows.zero + v * kLanes, group_zero<KIND>(w, p.header, v));
    }
}

// A sum and what its additions have rounded off: an input far larger than all others costs no bits of theirs.
struct Total {
    vf sum, rest;
};

AP_INLINE void add_product(Total& t, vf a, vf b) {
    const vf product = a * b, sum = t.sum + product, added = sum - t.sum;
    t.rest += (t.sum - (sum - added)) + (product - added) + fma(a, b, -product);
    t.sum = sum;
}

// The four lanes of a row. A sum that is too large for a float has no rest.
AP_INLINE float sum_of_lanes(const float* sum, const float* rest) {
    double total = 0, more = 0;
    for (int i = 0; i < 4; i++) total += sum[i];
    for (int i = 0; i < 4; i++) more += rest[i];
    return static_cast<float>(more == more ? total + more : total);
}

// total[r][m] += scale * sum q x + middle * sum x over the `count` k from `k` on of one group, whose codes lie at w.
template <int M, int R, int KIND>
AP_INLINE void add_chain(const uint8_t* w, const Rows& rows, const ap_linear& s, const Table& table,
    const Activations& a, int64_t token, int64_t k, int64_t count, int64_t row, Total (*total)[M]) {
    Sums<M, R> sums = {};
    const float* x = KIND == AP_TABLE ? a.x : a.padded;
    const int64_t stride = KIND == AP_TABLE ? a.x_stride : a.stride;
    const uint8_t* codes = w + row * 4;
    const float* given = x + token * stride + k;
    if (kCodes<KIND> && s.offset == AP_ZERO_POINT)
        multiply_chain<M, R, KIND, kCodes<KIND>>(sums, codes, rows.zero + row, table, given, stride, count);
    else multiply_chain<M, R, KIND, false>(sums, codes, nullptr, table, given, stride, count);
    if (!has_low<KIND>(s)) {
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++)
                add_product(total[r][m], sums.dot[r][m], four_times(rows.scale + row + r * kRows));
        return;
    }
    for (int m = 0; m < M; m++) {
        float sum = 0;
        for (int64_t b = k / a.width; b * a.width < k + count; b++) sum += a.block[(token + m) * a.blocks + b].sum;
        for (int r = 0; r < R; r++) {  // a quarter to each of a row's 4 lanes; the total is rounded once
            const vf middle = splat(0.25f * sum) * four_times(rows.middle + row + r * kRows);
            total[r][m].sum += fma(sums.dot[r][m], four_times(rows.scale + row + r * kRows), middle);
        }
    }
}

template <int M, int KIND>
void dot_float(
    const ap_linear& w, const Layout& l, const uint8_t* block, const Activations& a, int64_t token, float (*y)[16]) {
    constexpr int R = 8 / M * kRows > 16 ? 16 / kRows : 8 / M;  // 8 sums: enough chains, few enough registers
    const Table table = KIND == AP_TABLE ? table_of(w) : Table{};
    for (int64_t row = 0; row < 16; row += R * kRows) {
        Total total[R][M] = {};
        for (int64_t g = 0; g < l.groups; g++) {
            const Place p = place_of(l, block, g);
            Rows rows;
            read_rows<KIND>(w, p, rows);
            const int64_t chain = has_low<KIND>(w) ? kBlockChain : kChain;
            for (int64_t k = 0; k < l.group; k += chain) {
                const int64_t count = l.group - k < chain ? l.group - k : chain;
                add_chain<M, R, KIND>(
                    p.codes + k * kRowsBytes<KIND>, rows, w, table, a, token, g * l.group + k, count, row, total);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int m = 0; m < M; m++) {
                float sum[kLanes], rest[kLanes];
                store(sum, total[r][m].sum);
                store(rest, total[r][m].rest);
                for (int i = 0; i < kRows; i++) y[m][row + r * kRows + i] = sum_of_lanes(sum + 4 * i, rest + 4 * i);
            }
        }
    }
}

// Weights made float one by one and summed in float64: for tokens with a NaN or an Inf, which must meet scale * q +
// minimum itself, and for tokens whose products would underflow.
inline void dot_exact(
    const ap_linear& w, const Layout& l, const uint8_t* block, const float* x, int64_t rows, float* y) {
    double total[16] = {};
    for (int64_t g = 0; g < l.groups; g++) {
        const Place p = place_of(l, block, g);
        const Group group = group_at(w, p);
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t k = 0; k < w.group; k++) {
                const double u = code_at(w.kind, p.codes, row, k);
                total[row] += ((u - group.zero[row]) * group.scale[row] + group.low[row]) * x[g * w.group + k];
            }
        }
    }
    for (int64_t row = 0; row < rows; row++) y[row] = static_cast<float>(total[row]);
}

// Dense rows, row by row: lanes run over k.
template <int M>
void dot_dense(const ap_linear& w, int64_t first, int64_t rows, const float* x, int64_t stride, float (*y)[16]) {
    for (int64_t row = 0; row < rows; row++) {
        const float* p = static_cast<const float*>(w.data) + (first + row) * w.k;
        vf dot[M][2] = {};
        int64_t k = 0;
        for (; k + 2 * kLanes <= w.k; k += 2 * kLanes)
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 2; i++)
                    dot[m][i] = fma(load(p + k + i * kLanes), load(x + m * stride + k + i * kLanes), dot[m][i]);
        for (; k < w.k; k += kLanes) {
            const int64_t left = w.k - k < kLanes ? w.k - k : kLanes;
            for (int m = 0; m < M; m++)
                dot[m][0] = fma(load_part(p + k, left), load_part(x + m * stride + k, left), dot[m][0]);
        }
        for (int m = 0; m < M; m++) y[m][row] = sum(dot[m][0] + dot[m][1]);
    }
}

}  // namespace
