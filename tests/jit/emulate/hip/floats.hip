// Float arithmetic and conversions of a pair of inputs a thread.
#include <hip/hip_runtime.h>

#define KERNEL(name, T, OUT, ...)                                                \
    extern "C" __global__ void name(const T* as, const T* bs, OUT* out, int n) { \
        const int i = blockIdx.x * blockDim.x + threadIdx.x;                     \
        if (i >= n) return;                                                      \
        const T a = as[i], b = bs[i];                                            \
        __VA_ARGS__                                                              \
    }

// Exact: rounded once.
KERNEL(exact32, float, float, {
    float* o = out + 14 * i;
    o[0] = a + b, o[1] = a * b, o[2] = a / b, o[3] = sqrtf(fabsf(a)), o[4] = __builtin_fmaf(a, b, -a), o[5] = floorf(a);
    o[6] = rintf(b), o[7] = truncf(a), o[8] = ceilf(b), o[9] = fmaxf(a, b), o[10] = fminf(a, b),
    o[11] = copysignf(a, b);
    o[12] = ldexpf(a, int(b) & 31), o[13] = a - b;
})
KERNEL(exact64, double, double, {
    double* o = out + 10 * i;
    o[0] = a + b, o[1] = a * b, o[2] = a / b, o[3] = sqrt(fabs(a)), o[4] = __builtin_fma(a, b, -a), o[5] = floor(a);
    o[6] = rint(b), o[7] = fmax(a, b), o[8] = double(float(a)), o[9] = a - b;
})
// Within a few units in the last place.
KERNEL(functions, float, float, {
    float* o = out + 10 * i;
    const float p = fabsf(a);
    o[0] = expf(a), o[1] = logf(p), o[2] = exp2f(a), o[3] = log2f(p), o[4] = rsqrtf(p), o[5] = tanhf(a), o[6] = sinf(a);
    o[7] = cosf(b), o[8] = powf(p, b * 0.01f), o[9] = erff(a);
})
KERNEL(functions64, double, double, {
    double* o = out + 4 * i;
    o[0] = exp(a), o[1] = log(fabs(a)), o[2] = rsqrt(fabs(a)), o[3] = tanh(b);
})
KERNEL(to_integers, float, long, {
    long* o = out + 6 * i;
    o[0] = int(a), o[1] = unsigned(fabsf(a)), o[2] = long(b), o[3] = (long)(unsigned long)(fabsf(b));
    o[4] = (a < b) | (a <= b) << 1 | (a == b) << 2 | (a != b) << 3 | !(a < b) << 4 | (a > b) << 5 | !(a >= b) << 6;
    o[5] = isnan(a) | isinf(a) << 1 | isfinite(b) << 2 | signbit(b) << 3;
})
KERNEL(from_integers, long, float, {
    float* o = out + 6 * i;
    o[0] = float(int(a)), o[1] = float(unsigned(a)), o[2] = float(a), o[3] = float((unsigned long)(a));
    o[4] = float(a & 255) + float(a >> 8 & 255), o[5] = float(double(int(b)) + double(unsigned(a)));
})
KERNEL(halves, float, float, {
    using Half2 = _Float16 __attribute__((ext_vector_type(2)));
    float* o = out + 12 * i;
    const _Float16 x = a, y = b;
    const Half2 p = {x, y}, q = {y, _Float16(x * _Float16(0.5f))};
    const Half2 sum = p + q, product = p * q, fused = __builtin_elementwise_fma(p, q, p);
    o[0] = x, o[1] = x + y, o[2] = x * y, o[3] = x / y, o[4] = sum.x, o[5] = sum.y, o[6] = product.x, o[7] = fused.y;
    o[8] = __builtin_elementwise_max(p, q).x, o[9] = float(int(x)), o[10] = float(x) * float(y) + b;
    o[11] = __builtin_amdgcn_fdot2(p, q, a, false);
})
// bfloat16 by hand, as the project's kernels have it, and a packed pair of floats.
KERNEL(pairs, float, float, {
    using Float2 = float __attribute__((ext_vector_type(2)));
    float* o = out + 6 * i;
    const unsigned bits = __builtin_bit_cast(unsigned, a);
    const unsigned bf16 = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    o[0] = __builtin_bit_cast(float, bf16 << 16);
    const Float2 p = {a, b}, q = {b, 3.f}, r = __builtin_elementwise_fma(p, q, Float2{-b, a});
    const Float2 s = p + q, t = (p - q) * 2.f;
    o[1] = r.x, o[2] = r.y, o[3] = s.x * s.y, o[4] = t.x, o[5] = t.y;
})
