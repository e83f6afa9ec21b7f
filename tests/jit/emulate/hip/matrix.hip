// Products of 16 rows and more by matrix instructions of several types, in the layouts that the ISA document gives.
#include <hip/hip_runtime.h>

using Float4 = float __attribute__((ext_vector_type(4)));
using Float16 = float __attribute__((ext_vector_type(16)));
using Double4 = double __attribute__((ext_vector_type(4)));
using Int4 = int __attribute__((ext_vector_type(4)));
using Short4 = short __attribute__((ext_vector_type(4)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));

// c[32, 32] = a[32, 8 n] b[32, 8 n]^T
extern "C" __global__ void bf16_32(const short* a, const short* b, float* c, int n) {
    const int lane = threadIdx.x, row = lane & 31, at = 4 * (lane >> 5), k = 8 * n;
    Float16 sum = {};
    for (int i = 0; i < n; ++i)
        sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(
            *(const Short4*)(a + row * k + 8 * i + at), *(const Short4*)(b + row * k + 8 * i + at), sum, 0, 0, 0);
    for (int i = 0; i < 16; ++i) c[(8 * (i / 4) + 4 * (lane >> 5) + i % 4) * 32 + row] = sum[i];
}
// c[16, 16] = a[16, 16 n] b[16, 16 n]^T
extern "C" __global__ void f16_16(const _Float16* a, const _Float16* b, float* c, int n) {
    const int lane = threadIdx.x, row = lane & 15, at = 4 * (lane >> 4), k = 16 * n;
    Float4 sum = {};
    for (int i = 0; i < n; ++i)
        sum = __builtin_amdgcn_mfma_f32_16x16x16f16(
            *(const Half4*)(a + row * k + 16 * i + at), *(const Half4*)(b + row * k + 16 * i + at), sum, 0, 0, 0);
    for (int i = 0; i < 4; ++i) c[(at + i) * 16 + row] = sum[i];
}
// c[16, 16] = a[16, 4 n] b[16, 4 n]^T
extern "C" __global__ void f32_16(const float* a, const float* b, float* c, int n) {
    const int lane = threadIdx.x, row = lane & 15, at = lane >> 4, k = 4 * n;
    Float4 sum = {};
    for (int i = 0; i < n; ++i)
        sum = __builtin_amdgcn_mfma_f32_16x16x4f32(a[row * k + 4 * i + at], b[row * k + 4 * i + at], sum, 0, 0, 0);
    for (int i = 0; i < 4; ++i) c[(4 * at + i) * 16 + row] = sum[i];
}
extern "C" __global__ void f64_16(const double* a, const double* b, double* c, int n) {
    const int lane = threadIdx.x, row = lane & 15, at = lane >> 4, k = 4 * n;
    Double4 sum = {};
    for (int i = 0; i < n; ++i)
        sum = __builtin_amdgcn_mfma_f64_16x16x4f64(a[row * k + 4 * i + at], b[row * k + 4 * i + at], sum, 0, 0, 0);
    for (int i = 0; i < 4; ++i) c[(4 * i + at) * 16 + row] = sum[i];
}
// c[16, 16] = a[16, K n] b[16, K n]^T, K 16 on gfx90a and 32 later
extern "C" __global__ void i8_16(const signed char* a, const signed char* b, int* c, int n) {
    const int lane = threadIdx.x, row = lane & 15;
    Int4 sum = {};
#if defined(__gfx90a__)
    const int k = 16 * n, at = 4 * (lane >> 4);
    for (int i = 0; i < n; ++i)
        sum = __builtin_amdgcn_mfma_i32_16x16x16i8(
            *(const int*)(a + row * k + 16 * i + at), *(const int*)(b + row * k + 16 * i + at), sum, 0, 0, 0);
#else
    const int k = 32 * n, at = 8 * (lane >> 4);
    for (int i = 0; i < n; ++i)
        sum = __builtin_amdgcn_mfma_i32_16x16x32_i8(
            *(const long*)(a + row * k + 32 * i + at), *(const long*)(b + row * k + 32 * i + at), sum, 0, 0, 0);
#endif
    for (int i = 0; i < 4; ++i) c[(4 * (lane >> 4) + i) * 16 + row] = sum[i];
}
