// Sixteen rows of codes of a table times M tokens by AVX-512: a lane a row, a lookup for each k.
#pragma once
#include "dot_vnni.h"

#if defined(__AVX512VNNI__)
namespace {

// sum[m][i % 4] += table[code] * x over `count` k, a multiple of 8. A lookup reads a lane's low 4 bits alone.
template <int M>
AP_INLINE void multiply_codes(
    const uint8_t* w, __m512 table, const float* x, int64_t stride, int64_t count, __m512 (*sum)[4]) {
    for (int64_t k = 0; k < count; k += 8, w += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead<AP_TABLE>, _MM_HINT_T0);
        const __m512i words = _mm512_loadu_si512(w);
        for (int i = 0; i < 8; i++) {
            const __m512 value = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * (i % 4) + i / 4 * 4), table);
            for (int m = 0; m < M; m++)
                sum[m][i % 4] = _mm512_fmadd_ps(value, _mm512_set1_ps(x[m * stride + k + i]), sum[m][i % 4]);
        }
    }
}

template <int M>
void dot_table(
    const ap_linear& w, const Layout& l, const uint8_t* p, const Activations& a, int64_t token, float (*y)[16]) {
    constexpr int64_t chain = 128;  // k that are summed before scales
    const __m512 table = table_of(w);
    const float* x = a.x + token * a.x_stride;
    __m512 total[M], lost[M];
    for (int m = 0; m < M; m++) total[m] = lost[m] = _mm512_setzero_ps();
    for (int64_t g = 0; g < l.groups; g++, p += l.stride) {
        const __m512 scale = group_scale<AP_TABLE>(w, p, 0, 0);
        for (int64_t k = 0; k < l.group; k += chain) {
            const int64_t count = l.group - k < chain ? l.group - k : chain;
            __m512 sum[M][4] = {};
            multiply_codes<M>(p + l.header + k * 8, table, x + g * l.group + k, a.x_stride, count, sum);
            for (int m = 0; m < M; m++) {
                const __m512 both =
                    _mm512_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]), _mm512_add_ps(sum[m][2], sum[m][3]));
                add(total[m], lost[m], _mm512_mul_ps(both, scale));
            }
        }
    }
    for (int m = 0; m < M; m++) {  // of an infinite total a NaN would be lost
        const __mmask16 finite = _mm512_cmp_ps_mask(lost[m], lost[m], _CMP_ORD_Q);
        _mm512_storeu_ps(y[m], _mm512_mask_add_ps(total[m], finite, total[m], lost[m]));
    }
}

}  // namespace
#endif
