// Sixteen rows of int8 or int4 weights times M tokens by VNNI: a product for each limb of x (activations.h).
#pragma once
#include "activations.h"

#if defined(__AVX512VNNI__)
namespace {

template <int M> struct LimbSums {
    __m512i limb[M][kLimbs];
};

template <int M, int KIND> AP_INLINE void begin(LimbSums<M>& s, const Block* block, int64_t stride) {
    for (int m = 0; m < M; m++) {
        const int32_t* start = KIND == AP_INT8 ? block[m * stride].start8 : block[m * stride].start4;
        for (int p = 0; p < kLimbs; p++) s.limb[m][p] = _mm512_set1_epi32(start[p]);
    }
}

// `weights`: 16 rows of 4 k. `x`: the limbs of these 4 k, for each token `stride` bytes on.
template <int M> AP_INLINE void multiply(LimbSums<M>& s, __m512i weights, const int8_t* x, int64_t stride) {
    for (int m = 0; m < M; m++) {
        for (int p = 0; p < kLimbs; p++) {
            int32_t four;
            memcpy(&four, x + m * stride + 4 * p, 4);
            s.limb[m][p] = _mm512_dpbusd_epi32(s.limb[m][p], weights, _mm512_set1_epi32(four));
        }
    }
}

// How far ahead of the loads memory is asked for (measured): over page ends and into the next block, which hardware
// does not do.
template <int KIND> constexpr int64_t kAhead = KIND == AP_INT8 ? 8192 : 6144;

// Two sets of sums where M = 1: four chains of dependent products would wait for each other.
template <int M, int KIND>
AP_INLINE void multiply_block(
    const uint8_t* w, const int8_t* x, int64_t stride, int64_t count, LimbSums<M>& even, LimbSums<M>& odd) {
    const __m512i low = _mm512_set1_epi8(15);
    const auto* ahead = reinterpret_cast<const char*>(w) + kAhead<KIND>;
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m512i first, second;
        if (KIND == AP_INT8) {
            _mm_prefetch(ahead + k * 16, _MM_HINT_T0);
            _mm_prefetch(ahead + k * 16 + 64, _MM_HINT_T0);
            first = _mm512_loadu_si512(w + k * 16);
            second = _mm512_loadu_si512(w + k * 16 + 64);
        } else {
            _mm_prefetch(ahead + k * 8, _MM_HINT_T0);
            const __m512i both = _mm512_loadu_si512(w + k * 8);
            first = _mm512_and_si512(both, low);
            second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        multiply<M>(even, first, x + k * 4, stride);
        multiply<M>(M == 1 ? odd : even, second, x + k * 4 + 16, stride);
    }
    if (KIND == AP_INT8 && k < count) multiply<M>(even, _mm512_loadu_si512(w + k * 16), x + k * 4, stride);
}

// sum of q * x of a block, in units of its uppermost limb
AP_INLINE __m512 join(const __m512i even[kLimbs], const __m512i odd[kLimbs]) {
    __m512 total = _mm512_setzero_ps();
    for (int p = 0; p < kLimbs; p++)
        total =
            _mm512_fmadd_ps(total, _mm512_set1_ps(1.0f / 256), _mm512_cvtepi32_ps(_mm512_add_epi32(even[p], odd[p])));
    return total;
}

AP_INLINE __m512 header(const uint8_t* p, bool half) {
    if (half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_loadu_ps(p);
}

// total += value, with what the addition lost kept apart (Knuth's two-sum): a sum over blocks then rounds about once,
// while torch's own may be lucky. Some 1% of a block's instructions.
AP_INLINE void add(__m512& total, __m512& lost, __m512 value) {
    const __m512 sum = _mm512_add_ps(total, value);
    const __m512 part = _mm512_sub_ps(sum, total);
    lost =
        _mm512_add_ps(lost, _mm512_add_ps(_mm512_sub_ps(total, _mm512_sub_ps(sum, part)), _mm512_sub_ps(value, part)));
    total = sum;
}

// A format with a minimum is taken as (u - 8) * scale + (minimum + 8 * scale): two terms that do not cancel each other.
// y[m][row] of one block of rows for M tokens from `token` on.
template <int M, int KIND>
void dot_vnni(
    const ap_linear& w, const Layout& l, const uint8_t* p, const Activations& a, int64_t token, float (*y)[16]) {
    const int64_t stride = a.stride * 4;
    const int8_t* x = a.limbs + token * stride;
    const Block* block = a.block + token * a.blocks;
    __m512 total[M], lost[M];
    for (int m = 0; m < M; m++) total[m] = lost[m] = _mm512_setzero_ps();
    for (int64_t g = 0; g < l.groups; g++, p += l.group_bytes) {
        const __m512 scale = header(p, w.half_scales);
        __m512 middle = _mm512_setzero_ps();
        if (KIND == AP_INT4 && w.minimum)
            middle = _mm512_fmadd_ps(scale, _mm512_set1_ps(8), header(p + l.part, w.half_scales));
        for (int64_t k = 0; k < l.group; k += a.width, x += a.width * 4, block++) {
            const int64_t count = l.group - k < a.width ? l.group - k : a.width;
            const uint8_t* weights = p + l.header + k * (KIND == AP_INT8 ? 16 : 8);
            LimbSums<M> even, odd = {};
            begin<M, KIND>(even, block, a.blocks);
            if (count == 64) multiply_block<M, KIND>(weights, x, stride, 64, even, odd);
            else multiply_block<M, KIND>(weights, x, stride, count, even, odd);
            for (int m = 0; m < M; m++) {
                const Block& b = block[m * a.blocks];
                const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(b.step));
                __m512 value = _mm512_mul_ps(join(even.limb[m], odd.limb[m]), step);
                if (KIND == AP_INT4 && w.minimum) value = _mm512_fmadd_ps(middle, _mm512_set1_ps(b.sum), value);
                add(total[m], lost[m], value);
            }
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(y[m], _mm512_add_ps(total[m], lost[m]));
}

}  // namespace
#endif
