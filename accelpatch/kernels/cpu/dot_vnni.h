// Dot products of 16 rows of integer weights with M tokens by VNNI, one for each limb of x (activations.h).
#pragma once
#include "activations.h"
#include "scales.h"

#if defined(__AVX512VNNI__)
namespace {

template <int M> struct LimbSums {
    __m512i limb[M][kLimbs];
};

template <int M, int KIND> AP_INLINE void begin(LimbSums<M>& s, const Block* block, int64_t stride) {
    for (int m = 0; m < M; m++) {
        const int32_t* start = KIND == AP_INT8 ? block[m * stride].start8 : block[m * stride].start4;
        for (int p = 0; p < kLimbs; p++)
            s.limb[m][p] = _mm512_set1_epi32(KIND == AP_INT8 ? start[p] : start[p] / 8 * kCentre<KIND>);
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

// How many bytes ahead of the loads are prefetched (measured): across pages and into the next block, which the hardware
// prefetcher does not do.
template <int KIND> constexpr int64_t kAhead = KIND == AP_INT8 ? 8192 : 6144;

// Multiplies the 4 vectors, of 4 k each, of a group of Q6_K.
template <int M>
AP_INLINE void multiply_six(const uint8_t* w, const int8_t* x, int64_t stride, LimbSums<M>& even, LimbSums<M>& odd) {
    const __m512i low = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(0x30);
    for (int i = 0; i < 3; i++) _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead<AP_Q6_K> + 64 * i, _MM_HINT_T0);
    const __m512i high = _mm512_loadu_si512(w + 128);
    for (int i = 0; i < 2; i++) {
        const __m512i both = _mm512_loadu_si512(w + 64 * i);
        const __m512i first = i ? high : _mm512_slli_epi16(high, 4),
                      second = i ? _mm512_srli_epi16(high, 2) : _mm512_slli_epi16(high, 2);
        multiply<M>(
            even, _mm512_or_si512(_mm512_and_si512(both, low), _mm512_and_si512(first, upper)), x + i * 32, stride);
        multiply<M>(M == 1 ? odd : even,
            _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), _mm512_and_si512(second, upper)),
            x + i * 32 + 16, stride);
    }
}

// Fields of 16 bits shifted to the right, or to the left where `right` is negative; a constant once loops are unrolled.
AP_INLINE __m512i moved(__m512i v, int right) {
    typedef uint16_t Words __attribute__((vector_size(64)));
    const auto words = reinterpret_cast<Words>(v);
    return reinterpret_cast<__m512i>(right < 0 ? words << -right : words >> right);
}

// Of AP_INT3: 8 vectors of 4 k for each 32 k.
template <int M>
AP_INLINE void multiply_three(
    const uint8_t* w, const int8_t* x, int64_t stride, int64_t count, LimbSums<M>& even, LimbSums<M>& odd) {
    const __m512i low = _mm512_set1_epi8(3), one = _mm512_set1_epi8(4);
    for (int64_t k = 0; k < count; k += 32, w += 192, x += 128) {
        for (int i = 0; i < 3; i++)
            _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead<AP_INT3> + 64 * i, _MM_HINT_T0);
        const __m512i upper = _mm512_loadu_si512(w + 128);
        for (int v = 0; v < 8; v++) {
            const __m512i two = moved(_mm512_loadu_si512(w + v / 4 * 64), v % 4 * 2), bit = moved(upper, v - 2);
            const __m512i codes = _mm512_or_si512(_mm512_and_si512(two, low), _mm512_and_si512(bit, one));
            multiply<M>(M == 1 && v % 2 ? odd : even, codes, x + v * 16, stride);
        }
    }
}

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

// total += value, with what the addition lost kept apart (Knuth's two-sum): a sum over blocks then rounds about once,
// while torch's own may be lucky. Some 1% of a block's instructions.
AP_INLINE void add(__m512& total, __m512& lost, __m512 value) {
    const __m512 sum = _mm512_add_ps(total, value);
    const __m512 part = _mm512_sub_ps(sum, total);
    lost =
        _mm512_add_ps(lost, _mm512_add_ps(_mm512_sub_ps(total, _mm512_sub_ps(sum, part)), _mm512_sub_ps(value, part)));
    total = sum;
}

// total += a group's products with M tokens, whose activations begin at x and block, which move on.
template <int M, int KIND, bool MIDDLE>
AP_INLINE void add_group(const ap_linear& w, const Layout& l, const Place& p, const Activations& a, const int8_t*& x,
    const Block*& block, __m512* total, __m512* lost) {
    const int64_t stride = a.stride * 4;
    const __m512 scale = group_scale<KIND>(w, p.header, p.at, 0);
    __m512 middle = _mm512_setzero_ps();
    if (MIDDLE) middle = group_middle<KIND>(w, p.header, p.at, 0, scale);
    for (int64_t k = 0; k < l.group; k += a.width, x += a.width * 4, block++) {
        const int64_t count = l.group - k < a.width ? l.group - k : a.width;
        const uint8_t* weights = p.codes + k * kRowsBytes<KIND>;
        LimbSums<M> even, odd = {};
        begin<M, KIND>(even, block, a.blocks);
        if (KIND == AP_Q6_K) multiply_six<M>(weights, x, stride, even, odd);
        else if (KIND == AP_INT3) multiply_three<M>(weights, x, stride, count, even, odd);
        else if (KIND == AP_Q4_K) multiply_block<M, AP_INT4>(weights, x, stride, 32, even, odd);
        else if (count == 64) multiply_block<M, KIND>(weights, x, stride, 64, even, odd);
        else multiply_block<M, KIND>(weights, x, stride, count, even, odd);
        for (int m = 0; m < M; m++) {
            const Block& b = block[m * a.blocks];
            const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(b.step));
            __m512 value = _mm512_mul_ps(join(even.limb[m], odd.limb[m]), step);
            if (MIDDLE) value = _mm512_fmadd_ps(middle, _mm512_set1_ps(b.sum), value);
            add(total[m], lost[m], value);
        }
    }
}

// y[m][row] of one block of rows for M tokens from `token` on. MIDDLE: w is more than (u - centre) * scale.
template <int M, int KIND, bool MIDDLE = KIND == AP_Q4_K>
void dot_vnni(
    const ap_linear& w, const Layout& l, const uint8_t* header, const Activations& a, int64_t token, float (*y)[16]) {
    const int8_t* x = a.limbs + token * a.stride * 4;
    const Block* block = a.block + token * a.blocks;
    __m512 total[M], lost[M];
    for (int m = 0; m < M; m++) total[m] = lost[m] = _mm512_setzero_ps();
    for (int64_t g = 0; g < l.groups; g += kHeaderGroups<KIND>, header += l.stride) {
        Place p = {header, 0, header + l.header};
        for (; p.at < kHeaderGroups<KIND>; p.at++, p.codes += l.codes)
            add_group<M, KIND, MIDDLE>(w, l, p, a, x, block, total, lost);
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(y[m], _mm512_add_ps(total[m], lost[m]));
}

}  // namespace
#endif
