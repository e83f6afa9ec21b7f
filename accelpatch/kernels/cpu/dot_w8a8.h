// Products of int8 weights with int8 activations: blocks of 16 rows times M tokens, summed as int32 over all of k.
//
//   y = fma(row scale * scale, float(sum of (u - 128) q), bias)     u: the unsigned bytes of the pack
//
// The bytes are multiplied as they lie, and 128 times the sum of a row's q is subtracted behind: int32 wraps, so that
// the difference is exact wherever it fits. Arm's dot products take signed bytes alone: there 128 goes first.
#pragma once
#include "activations.h"

namespace {

typedef uint32_t vu32 __attribute__((vector_size(AP_LANES * 4)));

#if defined(AP_DOTPROD)
constexpr uint32_t kSubtracted = 0;
#else
constexpr uint32_t kSubtracted = 128;
#endif

#if defined(__AVX512VNNI__)

constexpr int kTileTokens = 12, kTileBlocks = 2;  // 24 accumulators, which leave registers for the weights
constexpr int64_t kStreamAhead = 8192;            // bytes, as in dot_vnni.h

// out[M][B * 16]: sums of u q over `steps` times four k, of blocks `block_bytes` apart. A dot product instruction waits
// for the one before that adds to the same sum: where there are few sums, each is computed in several parts.
template <int M, int B>
AP_INLINE void int8_sums(
    const uint8_t* w, int64_t block_bytes, const Quantized* x, int64_t stride, int64_t steps, uint32_t (*out)[B * 16]) {
    constexpr int parts = M * B >= 8 ? 1 : M * B >= 4 ? 2 : 4;
    __m512i sum[parts][M][B] = {};
    auto step = [&](int64_t at, __m512i(*sums)[B]) {
        __m512i weights[B];
        for (int b = 0; b < B; b++) {
            const uint8_t* p = w + b * block_bytes + at * 64;
            if (M <= 4) _mm_prefetch(reinterpret_cast<const char*>(p) + kStreamAhead, _MM_HINT_T0);
            weights[b] = _mm512_loadu_si512(p);
        }
        for (int m = 0; m < M; m++) {
            int32_t four;
            memcpy(&four, x + m * stride + at * 4, 4);
            for (int b = 0; b < B; b++)
                sums[m][b] = _mm512_dpbusd_epi32(sums[m][b], weights[b], _mm512_set1_epi32(four));
        }
    };
    int64_t at = 0;
    for (; at + parts <= steps; at += parts)
        for (int p = 0; p < parts; p++) step(at + p, sum[p]);
    for (; at < steps; at++) step(at, sum[0]);
    for (int m = 0; m < M; m++) {
        for (int b = 0; b < B; b++) {
            for (int p = 1; p < parts; p++) sum[0][m][b] = _mm512_add_epi32(sum[0][m][b], sum[p][m][b]);
            _mm512_storeu_si512(out[m] + b * 16, sum[0][m][b]);
        }
    }
}

#elif defined(__AVX2__)

constexpr int kTileTokens = 6, kTileBlocks = 1;

// R vectors of 4 rows and 4 k: vpmaddwd of 16-bit integers, since vpmaddubsw saturates its sums of two.
template <int M, int R>
AP_INLINE void int8_vectors(
    const uint8_t* w, const Quantized* x, int64_t stride, int64_t steps, uint32_t* out, int64_t out_stride) {
    static_assert(R % 2 == 0, "sums are joined in pairs");
    __m256i sum[M][R];
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sum[m][r] = _mm256_setzero_si256();
    int64_t at = 0;
    do {
        if (M == 1) _mm_prefetch(reinterpret_cast<const char*>(w) + 4096, _MM_HINT_T0);
        __m256i weights[R];
        for (int r = 0; r < R; r++)
            weights[r] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w) + r));
        for (int m = 0; m < M; m++) {
            int64_t four;
            memcpy(&four, x + m * stride + at * 4, 8);
            const __m256i q = _mm256_set1_epi64x(four);
            for (int r = 0; r < R; r++) {
                __m256i next = _mm256_add_epi32(sum[m][r], _mm256_madd_epi16(weights[r], q));
                asm("" : "+x"(next));  // g++ keeps a second copy of each sum without it
                sum[m][r] = next;
            }
        }
        w += 64;
    } while (++at < steps);
    for (int m = 0; m < M; m++) {
        for (int r = 0; r < R; r += 2) {  // lanes: two parts of a row's sum side by side
            const __m256i rows = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[m][r], sum[m][r + 1]), 0xd8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + m * out_stride + r * 4), rows);
        }
    }
}

template <int M, int B>
AP_INLINE void int8_sums(
    const uint8_t* w, int64_t block_bytes, const Quantized* x, int64_t stride, int64_t steps, uint32_t (*out)[B * 16]) {
    static_assert(B == 1, "one block at a time");
    (void)block_bytes;
    if (M <= 2) {
        int8_vectors<M, 4>(w, x, stride, steps, out[0], 16);
    } else {  // 16 registers
        int8_vectors<M, 2>(w, x, stride, steps, out[0], 16);
        int8_vectors<M, 2>(w + 32, x, stride, steps, out[0] + 8, 16);
    }
}

#elif defined(AP_DOTPROD)

constexpr int kTileTokens = 4, kTileBlocks = 1;

template <int M, int B>
AP_INLINE void int8_sums(
    const uint8_t* w, int64_t block_bytes, const Quantized* x, int64_t stride, int64_t steps, uint32_t (*out)[B * 16]) {
    static_assert(B == 1, "one block at a time");
    (void)block_bytes;
    int32x4_t sum[M][4] = {};
    for (int64_t at = 0; at < steps; at++, w += 64) {
        if (M == 1) __builtin_prefetch(w + 4096);
        int8x16_t weights[4];
        for (int r = 0; r < 4; r++) weights[r] = as_signed(vld1q_u8(w + 16 * r));
        for (int m = 0; m < M; m++) {
            int32_t four;
            memcpy(&four, x + m * stride + at * 4, 4);
            const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(four));
            for (int r = 0; r < 4; r++) sum[m][r] = vdotq_s32(sum[m][r], weights[r], q);
        }
    }
    for (int m = 0; m < M; m++) memcpy(out[m], sum[m], sizeof sum[m]);
}

#else

constexpr int kTileTokens = 4, kTileBlocks = 1;

// sum += u q of four rows and four k. A row's sum lies in 4 / kVectors lanes side by side.
#if defined(__SSE2__)
constexpr int kVectors = 2;
AP_INLINE void multiply_rows(vu32* sum, const uint8_t* w, const Quantized* x) {
    int64_t four;
    memcpy(&four, x, 8);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)), zero = _mm_setzero_si128(),
                  q = _mm_set1_epi64x(four);
    sum[0] += reinterpret_cast<vu32>(_mm_madd_epi16(_mm_unpacklo_epi8(bytes, zero), q));
    sum[1] += reinterpret_cast<vu32>(_mm_madd_epi16(_mm_unpackhi_epi8(bytes, zero), q));
}
#else
constexpr int kVectors = 4;
AP_INLINE void multiply_rows(vu32* sum, const uint8_t* w, const Quantized* x) {
    const vi q = {x[0], x[1], x[2], x[3]};
    for (int r = 0; r < 4; r++) {
        vu u;
        memcpy(&u, w + 4 * r, sizeof u);
        sum[r] += reinterpret_cast<vu32>(__builtin_convertvector(u, vi) * q);
    }
}
#endif

template <int M, int B>
AP_INLINE void int8_sums(
    const uint8_t* w, int64_t block_bytes, const Quantized* x, int64_t stride, int64_t steps, uint32_t (*out)[B * 16]) {
    static_assert(B == 1, "one block at a time");
    (void)block_bytes;
    for (int row = 0; row < 16; row += 4) {
        vu32 sum[M][kVectors] = {};
        for (int64_t at = 0; at < steps; at++)
            for (int m = 0; m < M; m++) multiply_rows(sum[m], w + at * 64 + row * 4, x + m * stride + at * 4);
        for (int m = 0; m < M; m++) {
            uint32_t lanes[kVectors * 4];
            memcpy(lanes, sum[m], sizeof lanes);
            for (int r = 0; r < 4; r++) {
                out[m][row + r] = 0;
                for (int i = 0; i < kVectors; i++) out[m][row + r] += lanes[r * kVectors + i];
            }
        }
    }
}

#endif

// a * b + c, rounded once. In float64 where a machine has no such instruction: its product is exact.
AP_INLINE vf fma_once(vf a, vf b, vf c) {
#if AP_LANES == 4 && !defined(__aarch64__)
    typedef double wide __attribute__((vector_size(AP_LANES * 8)));
    const wide exact = __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide);
    return __builtin_convertvector(exact + __builtin_convertvector(c, wide), vf);
#else
    return fma(a, b, c);
#endif
}

// y[M][B * 16] of blocks b, b + 1 ..., for tokens from `token` on. Rows beyond the weight's own are written, too.
template <int M, int B> void w8a8_tile(const Weight& w, int64_t b, const Activations& a, int64_t token, float* y) {
    const uint8_t* p = static_cast<const uint8_t*>(w.w.data) + b * w.l.block_bytes;
    uint32_t sums[M][B * 16];
    int8_sums<M, B>(p + w.l.header, w.l.block_bytes, a.rows + token * a.stride, a.stride, w.l.group / 4, sums);
    for (int i = 0; i < B; i++) {
        float scale[16], bias[16];
        memcpy(scale, p + i * w.l.block_bytes, sizeof scale);
        for (float& one : bias) one = -0.0f;  // adding it changes nothing
        if (w.w.bias)
            memcpy(bias, w.w.bias + (b + i) * kBlockRows, static_cast<size_t>(rows_in(w, b + i)) * sizeof(float));
        for (int m = 0; m < M; m++) {
            const RowScale& row = a.scale[token + m];
            const uint32_t start = -kSubtracted * static_cast<uint32_t>(row.sum);
            for (int at = 0; at < 16; at += kLanes) {
                vu32 sum;
                memcpy(&sum, sums[m] + i * 16 + at, sizeof sum);
                const vf value = __builtin_convertvector(reinterpret_cast<vi>(sum + start), vf);
                store(y + (m * B + i) * 16 + at, fma_once(splat(row.scale) * load(scale + at), value, load(bias + at)));
            }
        }
    }
}

// y[count][B * 16] for any number of tokens.
template <int B>
void w8a8_tokens(const Weight& w, int64_t b, const Activations& a, int64_t token, int64_t count, float* y) {
    int64_t m = 0;
    for (; m + kTileTokens <= count; m += kTileTokens) w8a8_tile<kTileTokens, B>(w, b, a, token + m, y + m * B * 16);
#if defined(__AVX512VNNI__)
    if (count - m >= 8) w8a8_tile<8, B>(w, b, a, token + m, y + m * B * 16), m += 8;
#endif
    if (count - m >= 4) w8a8_tile<4, B>(w, b, a, token + m, y + m * B * 16), m += 4;
    if (count - m >= 2) w8a8_tile<2, B>(w, b, a, token + m, y + m * B * 16), m += 2;
    if (count - m >= 1) w8a8_tile<1, B>(w, b, a, token + m, y + m * B * 16);
}

}  // namespace
