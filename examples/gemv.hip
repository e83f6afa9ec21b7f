// y[m, n] = x[m, k] @ w[n, k]^T + bias[n] for few rows m: 32 lanes compute one value of y, and read one row of w.
// Any k: 8 values at once where the rows lie at multiples of 16 bytes, and what is left one by one.
// One source for AMD (clang -x hip) and NVIDIA (nvcc -x cu). Launch: grid [ceil(n / 8), m], block [32, 8].
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#elif defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

constexpr int LANES = 32, VECTOR = 8;

struct Bf16 {
    unsigned short bits;
    __device__ float wide() const {
        unsigned word = unsigned(bits) << 16;
        float value;
        __builtin_memcpy(&value, &word, 4);
        return value;
    }
    __device__ static Bf16 of(float value) {  // the nearest, ties to even
        unsigned word;
        __builtin_memcpy(&word, &value, 4);
        if (value != value) return {0x7fc0};
        return {(unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16)};
    }
};

struct Fp16 {
    unsigned short bits;
#if defined(__CUDACC__) && !defined(__HIP__)
    __device__ float wide() const { return __half2float(__ushort_as_half(bits)); }
    __device__ static Fp16 of(float value) { return {__half_as_ushort(__float2half_rn(value))}; }
#else
    __device__ float wide() const {
        _Float16 value;
        __builtin_memcpy(&value, &bits, 2);
        return float(value);
    }
    __device__ static Fp16 of(float value) {
        _Float16 narrow = _Float16(value);
        Fp16 made;
        __builtin_memcpy(&made.bits, &narrow, 2);
        return made;
    }
#endif
};

__device__ inline float from_lane_above(float value, int step) {
#if defined(__CUDACC__) && !defined(__HIP__)
    return __shfl_down_sync(0xffffffffu, value, step, LANES);
#else
    return __shfl_down(value, step, LANES);
#endif
}

template <typename T> struct alignas(16) Vector {
    T values[VECTOR];
};

template <typename T> __device__ void gemv(const T* x, const T* w, const T* bias, T* y, int n, int k) {
    const int lane = threadIdx.x;
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= n) return;  // all lanes of the row together
    x += (long long)blockIdx.y * k, w += row * k;
    float sum = 0.0f;
    int done = 0;
    if (((unsigned long long)x | (unsigned long long)w) % sizeof(Vector<T>) == 0) {
        done = k / VECTOR * VECTOR;
        for (int at = lane * VECTOR; at < done; at += LANES * VECTOR) {
            const Vector<T> a = *reinterpret_cast<const Vector<T>*>(x + at);
            const Vector<T> b = *reinterpret_cast<const Vector<T>*>(w + at);
            for (int i = 0; i < VECTOR; ++i) sum += a.values[i].wide() * b.values[i].wide();
        }
    }
    for (int at = done + lane; at < k; at += LANES) sum += x[at].wide() * w[at].wide();
    for (int step = LANES / 2; step; step /= 2) sum += from_lane_above(sum, step);
    if (lane == 0) y[(long long)blockIdx.y * n + row] = T::of(bias ? sum + bias[row].wide() : sum);
}

extern "C" __global__ void gemv_bf16(const Bf16* x, const Bf16* w, const Bf16* bias, Bf16* y, int n, int k) {
    gemv(x, w, bias, y, n, k);
}
extern "C" __global__ void gemv_fp16(const Fp16* x, const Fp16* w, const Fp16* bias, Fp16* y, int n, int k) {
    gemv(x, w, bias, y, n, k);
}
