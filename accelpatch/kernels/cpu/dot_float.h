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
  float lane[kLanes];
  for (int i = 0; i < kLanes; i++) lane[i] = x[i % 4];
  return load(lane);
}

AP_INLINE vi bytes(const uint8_t* p) {
  vu v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vi);
}

// total[r][m] += scale * sum q x + minimum * sum x over one group, for R vectors of rows and M tokens.
template <int M, int R, int KIND>
AP_INLINE void add_group(const uint8_t* w, const uint8_t* header, const ap_linear& s, const Layout& l, const float* x, int64_t stride,
                         int64_t row, vf (*total)[M]) {
  vf dot[R][M] = {}, sum[M] = {};
  const bool minimum = KIND == AP_INT4 && s.minimum;
  const int zero = KIND == AP_INT8 ? 128 : minimum ? 0 : 8;
  for (int64_t k = 0; k < l.group; k += KIND == AP_INT8 ? 4 : 8) {
    for (int half = 0; half < (KIND == AP_INT8 ? 1 : 2); half++) {
      vf v[M];
      for (int m = 0; m < M; m++) {
        v[m] = repeat(x + m * stride + k + 4 * half);
        if (minimum) sum[m] += v[m];
      }
      for (int r = 0; r < R; r++) {
        vi q = bytes(w + (KIND == AP_INT8 ? k * 16 : k * 8) + (row + r * kRows) * 4);
        if (KIND == AP_INT4) q = half ? q >> 4 : q & 15;
        const vf f = __builtin_convertvector(q - zero, vf);
        for (int m = 0; m < M; m++) dot[r][m] += f * v[m];
      }
    }
  }
  float scale[16], low[16];
  load_scales(header, s.half_scales, scale);
  if (minimum) load_scales(header + l.part, s.half_scales, low);
  for (int r = 0; r < R; r++) {
    for (int m = 0; m < M; m++) {
      total[r][m] += dot[r][m] * four_times(scale + row + r * kRows);
      if (minimum) total[r][m] += sum[m] * four_times(low + row + r * kRows);
    }
  }
}

template <int M, int KIND>
void dot_float(const ap_linear& w, const Layout& l, const uint8_t* block, const Activations& a, int64_t token, float (*y)[16]) {
  constexpr int R = (M >= 8 ? 1 : 8 / M) * kRows > 16 ? 16 / kRows : (M >= 8 ? 1 : 8 / M);
  for (int64_t row = 0; row < 16; row += R * kRows) {
    vf total[R][M] = {};
    const uint8_t* p = block;
    const float* x = a.padded + token * a.stride;
    for (int64_t g = 0; g < l.groups; g++, p += l.group_bytes, x += l.group)
      add_group<M, R, KIND>(p + l.header, p, w, l, x, a.stride, row, total);
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

// Weights made float one by one, as torch would: for tokens with a NaN or an Inf, which must meet scale * q + minimum itself.
inline void dot_exact(const ap_linear& w, const Layout& l, const uint8_t* block, const float* x, int64_t rows, float* y) {
  for (int64_t row = 0; row < rows; row++) {
    const uint8_t* p = block;
    float total = 0;
    for (int64_t g = 0; g < l.groups; g++, p += l.group_bytes) {
      float scale[16], low[16] = {};
      load_scales(p, w.half_scales, scale);
      if (w.kind == AP_INT4 && w.minimum) load_scales(p + l.part, w.half_scales, low);
      for (int64_t k = 0; k < w.group; k++) {
        const uint8_t* q = p + l.header;
        const int value = w.kind == AP_INT8 ? int8_at(q, row, k) : int4_at(q, row, k) - (w.minimum ? 0 : 8);
        total += (static_cast<float>(value) * scale[row] + low[row]) * x[g * w.group + k];
      }
    }
    y[row] = total;
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
        for (int i = 0; i < 2; i++) dot[m][i] += load(p + k + i * kLanes) * load(x + m * stride + k + i * kLanes);
    for (; k < w.k; k += kLanes) {
      const int64_t left = w.k - k < kLanes ? w.k - k : kLanes;
      for (int m = 0; m < M; m++) dot[m][0] += load_part(p + k, left) * load_part(x + m * stride + k, left);
    }
    for (int m = 0; m < M; m++) y[m][row] = sum(dot[m][0] + dot[m][1]);
  }
}

}  // namespace
