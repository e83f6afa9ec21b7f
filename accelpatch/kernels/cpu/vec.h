// Vectors as wide as the path that is compiled, in the compilers' own vector extension: one source for AVX-512, AVX2,
// NEON and the rest. Everything here is static: a path's code must never be merged by the linker with another path's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define AP_LANES 16
#elif defined(__AVX2__)
#define AP_LANES 8
#else
#define AP_LANES 4
#endif
// Whether the machine has dot products of bytes: VNNI, or those of Armv8.2.
#if defined(__AVX512VNNI__)
#define AP_BYTES
#elif defined(__ARM_FEATURE_DOTPROD)
#define AP_BYTES
#define AP_DOTPROD
#endif
#define AP_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kLanes = AP_LANES;
typedef float vf __attribute__((vector_size(AP_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(AP_LANES * 4)));
typedef uint8_t vu __attribute__((vector_size(AP_LANES)));

AP_INLINE vf splat(float x) { return vf{} + x; }
AP_INLINE vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
AP_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
AP_INLINE vf as_float(vi v) { return reinterpret_cast<vf>(v); }
AP_INLINE vi as_int(vf v) { return reinterpret_cast<vi>(v); }
// a * b + c, rounded once where the machine can. It is called wherever it is meant, and files are compiled with
// -ffp-contract=off: what a compiler contracts by itself depends on the surrounding code, and the bits of a token must
// not depend on how many other tokens a call has.
AP_INLINE vf fma(vf a, vf b, vf c) {
#if AP_LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif AP_LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}
AP_INLINE vf abs(vf a) { return as_float(as_int(a) & 0x7fffffff); }

// The first `count` lanes of memory, zeros elsewhere.
AP_INLINE vf load_part(const float* p, int64_t count) {
    vf v = {};
    memcpy(&v, p, static_cast<size_t>(count) * 4);
    return v;
}
AP_INLINE void store_part(float* p, vf v, int64_t count) { memcpy(p, &v, static_cast<size_t>(count) * 4); }

// Adds halves onto halves.
#if AP_LANES > 4
AP_INLINE float sum_four(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
AP_INLINE float sum_eight(__m256 v) {
    return sum_four(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
}
#endif
AP_INLINE float sum(vf v) {
#if AP_LANES == 16
    return sum_eight(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
#elif AP_LANES == 8
    return sum_eight(v);
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
// Sums of products that little may be lost of: in double where a machine rounds a product before it adds it.
#if AP_LANES == 4 && !defined(__aarch64__)
typedef double vsum __attribute__((vector_size(AP_LANES * 8)));
AP_INLINE vsum add_product(vf a, vf b, vsum c) {
    return __builtin_convertvector(a, vsum) * __builtin_convertvector(b, vsum) + c;
}
AP_INLINE float sum(vsum v) { return static_cast<float>((v[0] + v[2]) + (v[1] + v[3])); }
#else
typedef vf vsum;
AP_INLINE vsum add_product(vf a, vf b, vsum c) { return fma(a, b, c); }
#endif
// e^x within 1.5 units in the last place: x = n ln 2 + r, a polynomial in r (Cephes), then 2^n in two factors so that
// results below the normal numbers are right too. NaN stays NaN, overflow is Inf.
AP_INLINE vf exp(vf x) {
    const vf low = splat(-104.0f), high = splat(89.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
    const vf shifted = fma(x, splat(1.44269504088896341f), magic);
    const vf n = shifted - magic;
    const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
    vf p = splat(1.9875691500e-4f);
    const float c[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (int i = 0; i < 5; i++) p = fma(p, r, splat(c[i]));
    p = fma(p, r * r, r) + 1.0f;
    const vi rounded = as_int(shifted) - as_int(magic), half = rounded >> 1;
    return p * as_float((half + 127) << 23) * as_float((rounded - half + 127) << 23);
}

// tanh within 2 units: a polynomial near zero (Cephes), elsewhere by exp.
AP_INLINE vf tanh(vf x) {
    const vf a = abs(x), s = x * x;
    vf p = splat(-5.70498872745e-3f);
    const float c[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
    for (int i = 0; i < 4; i++) p = fma(p, s, splat(c[i]));
    const vf small = fma(p * s, x, x);
    const vf far = 1.0f - 2.0f / (exp(a + a) + 1.0f);
    const vf large = x < 0.0f ? -far : far;
    return a < 0.625f ? small : large;
}

AP_INLINE float from_bfloat16(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
AP_INLINE uint16_t to_bfloat16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Shifted into place the exponent is 112 too small, which one product mends for normal and subnormal numbers alike.
AP_INLINE float from_half(uint16_t h) {
    uint32_t bits = (h & 0x7fffu) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    if ((h & 0x7c00) == 0x7c00) f = (h & 0x3ff) ? NAN : INFINITY;
    return (h & 0x8000) ? -f : f;
}
AP_INLINE uint16_t to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
    if (bits < 0x38800000) {                                              // subnormal: adding 0.5 rounds at 2^-24
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1) - (112u << 23);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

AP_INLINE vf load_half(const uint8_t* p) {
#if AP_LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif AP_LANES == 8
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    uint16_t h[kLanes];
    memcpy(h, p, sizeof h);
    return vf{from_half(h[0]), from_half(h[1]), from_half(h[2]), from_half(h[3])};
#endif
}

// kLanes unsigned bytes as integers.
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

}  // namespace
