// Activations of a W8A8 weight: q = rint(x * (127 / max |x|)) with a scale of max |x| / 127 a row, or with one static
// scale, saturated at -127 and 127. The same float32 operations as quantize_rows.py of ops, so the same integers.
#pragma once
#include "vec.h"

namespace {

// VNNI and Arm's dot products multiply bytes; the others 16-bit integers, which the rows are widened to once here.
#if defined(AP_BYTES)
typedef int8_t Quantized;
#else
typedef int16_t Quantized;
#endif
typedef Quantized vq __attribute__((vector_size(AP_LANES * sizeof(Quantized))));

constexpr float kLargest = 127.0f, kLeast = 0x1p-119f;  // the inverse of a smaller maximum is no float32

struct RowScale {
    float scale;
    int32_t sum;  // of the row's integers
};

// The bits of the largest |x|. As integers they order as the numbers do; those of Inf and NaN are the largest.
AP_INLINE int32_t largest_in(const float* x, int64_t k) {
    vi most[2] = {};
    int64_t i = 0;
    auto take = [](vi& largest, vf v) {
        const vi bits = as_int(v) & 0x7fffffff;
        largest = largest > bits ? largest : bits;
    };
    for (; i + 2 * kLanes <= k; i += 2 * kLanes) take(most[0], load(x + i)), take(most[1], load(x + i + kLanes));
    for (; i < k; i += kLanes) take(most[0], load_part(x + i, k - i < kLanes ? k - i : kLanes));
    int32_t found = 0;
    for (int lane = 0; lane < kLanes; lane++)
        for (const vi& one : most) found = one[lane] > found ? one[lane] : found;
    return found;
}

// Quantises x[k] to q[stride], with zeros after the k-th. given: the static scale, or 0 for none.
inline RowScale quantize_row(const float* x, int64_t k, int64_t stride, float given, Quantized* q) {
    const int32_t bits = largest_in(x, k);
    float most;
    memcpy(&most, &bits, 4);
    const bool finite = bits < 0x7f800000;
    if (!finite || (given == 0 && most < kLeast)) {
        memset(q, 0, static_cast<size_t>(stride) * sizeof(Quantized));
        return {finite ? 0.0f : NAN, 0};
    }
    const vf times = splat(given != 0 ? 1.0f / given : kLargest / most), low = splat(-kLargest), high = splat(kLargest);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
    vi total = {};
    auto put = [&](vf v, Quantized* to) {
        v = v * times;
        v = v < low ? low : v;
        v = v > high ? high : v;
        const vi rounded = as_int(v + magic) - as_int(magic);
        total += rounded;
        const vq narrow = __builtin_convertvector(rounded, vq);
        memcpy(to, &narrow, sizeof narrow);
    };
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) put(load(x + i), q + i);
    if (i < k) put(load_part(x + i, k - i), q + i), i += kLanes;
    if (i < stride) memset(q + i, 0, static_cast<size_t>(stride - i) * sizeof(Quantized));
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += total[lane];
    return {given != 0 ? given : most / kLargest, sum};
}

}  // namespace
