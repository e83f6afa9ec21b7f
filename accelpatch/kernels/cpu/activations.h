// Activations made ready for the products of one stage.
//
// Float paths: a copy padded with zeros to a multiple of 8.
// VNNI path: x is written, in blocks of 32 or 64 k, as (d0 + 256 d1 + 65536 d2) * unit / 65536 with d in [-128, 127]: 24 bits beside
// the block's largest |x|. Three VNNI products with the 8-bit weights are then exact integers, and nothing else rounds but the
// sum over blocks. That is as fine as float32 products, whose sums round at each step. A token with a NaN or an Inf
// has no such form: `finite` says so, and linear.h takes the dequantised path.
#pragma once
#include "layout.h"
#include "vec.h"

namespace {

struct Block {
  float unit;    // what one step of the uppermost digit is worth
  float sum;     // of the block's x, for formats with a minimum
  int32_t digits[3];  // sums of d0, d1, d2: they take the weights' offset of 128 (or 8) away again
};

struct Activations {
  int64_t k, tokens, stride;      // stride: padded k
  int64_t width, blocks;          // of the VNNI form
  const float* x;                 // the rows as they came
  int64_t x_stride;
  float* padded;                  // [tokens, stride]
  int8_t* digits;                 // [tokens, stride / 4, 4 planes (the last unused), 4 k]
  Block* block;                   // [tokens, blocks]
  uint8_t* finite;                // [tokens]
};

AP_INLINE int64_t block_width(const ap_linear& w) { return w.group == w.k || w.group % 64 == 0 ? 64 : 32; }

// Bytes of memory that `tokens` rows of k need, whatever the block width.
inline int64_t activation_bytes(int64_t tokens, int64_t k) {
  const int64_t stride = round_up(k, 64);
  return tokens * (stride * 4 + round_up(stride / 32 * static_cast<int64_t>(sizeof(Block)), 64)) + round_up(tokens, 64);
}

inline Activations activations_in(void* memory, int64_t tokens, int64_t k) {
  Activations a = {};
  a.k = k;
  a.tokens = tokens;
  a.stride = round_up(k, 64);
  auto* bytes = static_cast<uint8_t*>(memory);
  a.padded = reinterpret_cast<float*>(bytes);
  a.digits = reinterpret_cast<int8_t*>(bytes);
  bytes += tokens * a.stride * 4;
  a.block = reinterpret_cast<Block*>(bytes);
  a.finite = bytes + tokens * round_up(a.stride / 32 * static_cast<int64_t>(sizeof(Block)), 64);
  return a;
}

#if defined(__AVX512VNNI__)

inline bool split_block(const float* x, int64_t count, int64_t width, int8_t* digits, Block* block) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff), ones = _mm512_set1_epi8(1), bias = _mm512_set1_epi32(0x808080);
  const __m512i planes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m512 most = _mm512_setzero_ps();
  __m512i nonfinite = _mm512_setzero_si512();
  const int64_t parts = (width + 15) / 16;
  __m512 v[4];
  for (int64_t i = 0; i < parts; i++) {
    const int64_t left = count - 16 * i;
    const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1 << left) - 1) : 0;
    v[i] = _mm512_maskz_loadu_ps(mask, x + 16 * i);
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v[i]), sign);
    nonfinite = _mm512_max_epi32(nonfinite, magnitude);
    most = _mm512_max_ps(most, _mm512_castsi512_ps(magnitude));
  }
  if (_mm512_reduce_max_epi32(nonfinite) >= 0x7f800000) return false;
  const float small = _mm512_reduce_max_ps(most), lift = small < 0x1p-60f ? 0x1p80f : 1.0f, top = small * lift;
  const __m512 inverse = _mm512_set1_ps(top > 0 ? 8355711.0f / top : 0.0f);  // lifted: this must not overflow
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < parts; i++) {
    __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(v[i], _mm512_set1_ps(lift)), inverse));
    n = _mm512_xor_si512(_mm512_add_epi32(n, bias), bias);  // the bytes of n + 0x808080, each less 128
    n = _mm512_shuffle_epi8(n, planes);
    _mm512_storeu_si512(digits + 64 * i, n);
    sums = _mm512_dpbusd_epi32(sums, ones, n);
  }
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
  const __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  for (int p = 0; p < 3; p++) block->digits[p] = reinterpret_cast<const int32_t*>(&quarter)[p];
  block->unit = top / 8355711.0f * 65536.0f / lift;
  block->sum = static_cast<float>(block->digits[0] + 256 * block->digits[1] + 65536 * block->digits[2]) * (1.0f / 65536) * block->unit;
  return true;
}

#endif

// Makes tokens [first, last) ready. Padding up to the stride is zeros.
inline void prepare(Activations& a, int64_t first, int64_t last) {
  for (int64_t m = first; m < last; m++) {
    const float* x = a.x + m * a.x_stride;
    a.finite[m] = 1;
#if defined(__AVX512VNNI__)
    for (int64_t b = 0; b < a.blocks; b++) {
      const int64_t k = b * a.width;
      if (!split_block(x + k, a.k - k, a.width, a.digits + m * a.stride * 4 + k * 4, a.block + m * a.blocks + b)) a.finite[m] = 0;
    }
#else
    float* out = a.padded + m * a.stride;
    memcpy(out, x, static_cast<size_t>(a.k) * 4);
    memset(out + a.k, 0, static_cast<size_t>(a.stride - a.k) * 4);
#endif
  }
}

inline void describe(Activations& a, const float* x, int64_t x_stride, int64_t width) {
  a.x = x;
  a.x_stride = x_stride;
  a.width = width;
  a.blocks = (a.k + width - 1) / width;
}

}  // namespace
