// The loop of examples/jit/gemv.py as a HIP compiler makes it: y[N] = w[N, K] x[K] in bfloat16, with K known to the
// compiler, a wavefront a row, 16 bytes a load, sums in float32. UNROLL: how often the loop is unrolled, 1: as the
// compiler likes.
#include <hip/hip_runtime.h>

struct alignas(16) Eight {
    unsigned words[4];
};

extern "C" __global__ __launch_bounds__(256) void gemv(
    const unsigned short* w, const unsigned short* x, unsigned short* y, int n) {
    const int lane = threadIdx.x & 63, row = blockIdx.x * 4 + (threadIdx.x >> 6);
    if (row >= n) return;
    const Eight* a = (const Eight*)(w + (long)row * K);
    const Eight* b = (const Eight*)x;
    float total = 0.0f;
#if UNROLL > 1
#pragma unroll UNROLL
#endif
    for (int k = lane; k < K / 8; k += 64) {
        const Eight p = a[k], q = b[k];
        for (int i = 0; i < 4; ++i) {
            total += __uint_as_float(p.words[i] << 16) * __uint_as_float(q.words[i] << 16);
            total += __uint_as_float(p.words[i] & 0xffff0000u) * __uint_as_float(q.words[i] & 0xffff0000u);
        }
    }
    for (int step = 32; step; step /= 2) total += __shfl_down(total, step, 64);
    const unsigned bits = __float_as_uint(total);
    if (lane == 0) y[row] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
