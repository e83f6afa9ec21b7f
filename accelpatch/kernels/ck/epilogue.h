// The element operation of gemm_w8a8 (ops/linear/), with no header of HIP or CK: a host compiler builds it too.
//
//     a = (alpha row_scale) column_scale        y = relu?(fma(a, float(c), beta float(d)))        e = round(y)
//
// In float32, with one rounding to E's type: int8 to nearest even, saturated at -128 and 127, NaN as 0. bf16 is a
// uint16_t, as in CK.
#pragma once
#include <cstdint>

#if defined(__HIP__) || defined(__HIPCC__)
#define CK_ELEMENT __host__ __device__ inline
#else
#define CK_ELEMENT inline
#endif

namespace w8a8 {

CK_ELEMENT float bits_to_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

CK_ELEMENT uint32_t float_to_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

CK_ELEMENT float widened(int8_t d) { return static_cast<float>(d); }
CK_ELEMENT float widened(float d) { return d; }
CK_ELEMENT float widened(_Float16 d) { return static_cast<float>(d); }
CK_ELEMENT float widened(uint16_t d) { return bits_to_float(static_cast<uint32_t>(d) << 16); }

CK_ELEMENT void store(float& e, float y) { e = y; }
CK_ELEMENT void store(_Float16& e, float y) { e = static_cast<_Float16>(y); }
CK_ELEMENT void store(uint16_t& e, float y) {
    const uint32_t bits = float_to_bits(y);
    if (y != y) e = static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
    else e = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
CK_ELEMENT void store(int8_t& e, float y) {
    const float whole = __builtin_rintf(y);  // to nearest even; rintf is not constexpr, so none of this is
    const float limited = whole < -128.0f ? -128.0f : whole > 127.0f ? 127.0f : whole;
    e = y != y ? int8_t{0} : static_cast<int8_t>(limited);
}

// What CK applies to each element of E. The sources are the int32 of A B, then the Ds in the order of the forms below.
struct Epilogue {
    float alpha, beta;
    bool relu;

    CK_ELEMENT float activated(float y) const { return relu && y < 0.0f ? 0.0f : y; }
    CK_ELEMENT float scale(float row, float column) const { return (alpha * row) * column; }

    // A B
    template <class E> CK_ELEMENT void operator()(E& e, const int32_t& c) const {
        store(e, activated(alpha * static_cast<float>(c)));
    }
    // A B + D
    template <class E, class D> CK_ELEMENT void operator()(E& e, const int32_t& c, const D& d) const {
        store(e, activated(__builtin_fmaf(alpha, static_cast<float>(c), beta * widened(d))));
    }
    // A B with a scale for each row and for each column
    template <class E> CK_ELEMENT void operator()(E& e, const int32_t& c, const float& row, const float& column) const {
        store(e, activated(scale(row, column) * static_cast<float>(c)));
    }
    // the same, + D
    template <class E, class D>
    CK_ELEMENT void operator()(E& e, const int32_t& c, const float& row, const float& column, const D& d) const {
        store(e, activated(__builtin_fmaf(scale(row, column), static_cast<float>(c), beta * widened(d))));
    }
};

}  // namespace w8a8
