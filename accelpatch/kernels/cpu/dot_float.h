// Sixteen rows of weights times M tokens in float: what AVX2 and portable machines run, and dense weights everywhere.
#pragma once
#include "activations.h"

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

AP_INLINE vi bytes(const uint8_t* p) {
#if AP_LANES == 16
    return reinterpret_cast<vi>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif AP_LANES == 8
    return reinterpret_cast<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif AP_LANES == 4 && defined(__SSE2__)
    int32_t four;
    memcpy(&four, p, 4);
    const __m128i zero = _mm_setzero_si128();
    return reinterpret_cast<vi>(_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero));
#endif
    vu v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
}

constexpr int64_t kChain = 128;  // k summed in one chain: sums of sums lose less than one long sum

template <int M, int R> struct Sums {
    vf dot[R][M];
};

// dot += (q - zero) * x for R vectors of rows, 4 k and M tokens
template <int M, int R> AP_INLINE void multiply(Sums<M, R>& s, const vi* q, int zero, const float* x, int64_t stride) {
    vf v[M];
    for (int m = 0; m < M; m++) v[m] = repeat(x + m * stride);
    for (int r = 0; r < R; r++) {
        const vf f = __builtin_convertvector(q[r] - zero, vf);
        for (int m = 0; m < M; m++) s.dot[r][m] = fma(f, v[m], s.dot[r][m]);
    }
}

template <int M, int R, int KIND>
AP_INLINE void multiply_chain(Sums<M, R>& s, const uint8_t* w, const float* x, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k += KIND == AP_INT8 ? 4 : 8) {
        vi q[R], low[R], high[R];
        for (int r = 0; r < R; r++) {
            q[r] = bytes(w + (KIND == AP_INT8 ? k * 16 : k * 8) + r * kRows * 4);
            low[r] = q[r] & 15;
            high[r] = q[r] >> 4;
        }
        multiply<M, R>(s, KIND == AP_INT8 ? q : low, KIND == AP_INT8 ? 128 : 8, x + k, stride);
        if (KIND == AP_INT4) multiply<M, R>(s, high, 8, x + k + 4, stride);
    }
}

// total[r][m] += scale * sum q x + middle * sum x over `count` k of one group, for R vectors of rows and M tokens; the
// middle of an int4 format with a minimum is minimum + 8 * scale, so that the two terms do not cancel each other.
template <int M, int R, int KIND>
AP_INLINE void add_chain(const uint8_t* w, const uint8_t* header, const ap_linear& s, const Layout& l,
    const Activations& a, int64_t token, int64_t k, int64_t count, int64_t row, vf (*total)[M]) {
    Sums<M, R> sums = {};
    multiply_chain<M, R, KIND>(sums, w + row * 4, a.padded + token * a.stride + k, a.stride, count);
    float scale[16], middle[16];
    load_scales(header, s.half_scales, scale);
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) total[r][m] = fma(sums.dot[r][m], four_times(scale + row + r * kRows), total[r][m]);
    if (KIND != AP_INT4 || !s.minimum) return;
    load_scales(header + l.part, s.half_scales, middle);
    for (int i = 0; i < 16; i++) middle[i] += 8 * scale[i];
    for (int m = 0; m < M; m++) {
        float x = 0;
        for (int64_t b = k / a.width; b * a.width < k + count; b++) x += a.block[(token + m) * a.blocks + b].sum;
        for (int r = 0; r < R; r++)  // a quarter to each of a row's 4 lanes
            total[r][m] = fma(splat(0.25f * x), four_times(middle + row + r * kRows), total[r][m]);
    }
}

template <int M, int KIND>
void dot_float(
    const ap_linear& w, const Layout& l, const uint8_t* block, const Activations& a, int64_t token, float (*y)[16]) {
    constexpr int R = 8 / M * kRows > 16 ? 16 / kRows : 8 / M;  // 8 sums: enough chains, few enough registers
    for (int64_t row = 0; row < 16; row += R * kRows) {
        vf total[R][M] = {};
        const uint8_t* p = block;
        for (int64_t g = 0; g < l.groups; g++, p += l.group_bytes) {
            for (int64_t k = 0; k < l.group; k += kChain) {
                const int64_t count = l.group - k < kChain ? l.group - k : kChain;
                const uint8_t* weights = p + l.header + k * (KIND == AP_INT8 ? 16 : 8);
                add_chain<M, R, KIND>(weights, p, w, l, a, token, g * l.group + k, count, row, total);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int m = 0; m < M; m++) {
                float lane[kLanes];
                store(lane, total[r][m]);
                for (int i = 0; i < kRows; i++)
                    y[m][row + r * kRows + i] = (lane[4 * i] + lane[4 * i + 1]) + (lane[4 * i + 2] + lane[4 * i + 3]);
            }
        }
    }
}

// Weights made float one by one and summed in float64: for tokens with a NaN or an Inf, which must meet scale * q +
// minimum itself, and for tokens whose products would underflow.
inline void dot_exact(
    const ap_linear& w, const Layout& l, const uint8_t* block, const float* x, int64_t rows, float* y) {
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t* p = block;
        double total = 0;
        for (int64_t g = 0; g < l.groups; g++, p += l.group_bytes) {
            float scale[16], low[16] = {};
            load_scales(p, w.half_scales, scale);
            if (w.kind == AP_INT4 && w.minimum) load_scales(p + l.part, w.half_scales, low);
            for (int64_t k = 0; k < w.group; k++) {
                const uint8_t* q = p + l.header;
                const int value = w.kind == AP_INT8 ? int8_at(q, row, k) : int4_at(q, row, k) - (w.minimum ? 0 : 8);
                const double weight = static_cast<double>(value) * scale[row] + low[row];
                total += weight * x[g * w.group + k];
            }
        }
        y[row] = static_cast<float>(total);
    }
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
