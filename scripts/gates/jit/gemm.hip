// The tile of examples/jit/gemm.py as a HIP compiler makes it: c[M, N] = a[M, K] times b[N, K] transposed, with N and K
// known to the compiler, 128 x 128 a workgroup of four wavefronts, K tiles of 64 bytes in two buffers of LDS.
#include <hip/hip_runtime.h>

typedef int Four __attribute__((ext_vector_type(4)));
#if INT8
typedef int Sum __attribute__((ext_vector_type(16)));
constexpr int BYTES = 1;
#else
typedef float Sum __attribute__((ext_vector_type(16)));
typedef short Factor __attribute__((ext_vector_type(4)));
constexpr int BYTES = 2;
#endif
constexpr int TILE = 128, ROW = 64, STRIDE = ROW + 16, HALF = 2 * TILE * STRIDE, WIDTH = K * BYTES;

__device__ inline Sum multiplied(const Four& x, const Four& y, int pair, Sum sum) {
    const long a = (long)(unsigned)x[2 * pair] | (long)x[2 * pair + 1] << 32;
    const long b = (long)(unsigned)y[2 * pair] | (long)y[2 * pair + 1] << 32;
#if INT8
    return __builtin_amdgcn_mfma_i32_32x32x16_i8(a, b, sum, 0, 0, 0);
#else
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(
        __builtin_bit_cast(Factor, a), __builtin_bit_cast(Factor, b), sum, 0, 0, 0);
#endif
}

extern "C" __global__ __launch_bounds__(256) void gemm(const char* a, const char* b, int* c, int m) {
    __shared__ __attribute__((aligned(16))) char lds[2 * HALF];
    const int row = threadIdx.x >> 2, column = (threadIdx.x & 3) * 16, lane = threadIdx.x & 63, wave = threadIdx.x >> 6;
    const char* from[2] = {
        a + (long)(blockIdx.y * TILE + row) * WIDTH + column, b + (long)(blockIdx.x * TILE + row) * WIDTH + column};
    Four loaded[2][2];
    Sum sums[2][2] = {};
    const auto load = [&](int k) {
        for (int of = 0; of < 2; ++of)
            for (int half = 0; half < 2; ++half)
                loaded[of][half] = k < WIDTH ? *(const Four*)(from[of] + k + half * 64 * WIDTH) : Four{};
    };
    const auto store = [&](int into) {
        for (int of = 0; of < 2; ++of)
            for (int half = 0; half < 2; ++half)
                *(Four*)(lds + into * HALF + (of * TILE + half * 64 + row) * STRIDE + column) = loaded[of][half];
    };
    const char* read_from[2];
    for (int of = 0; of < 2; ++of)
        read_from[of] = lds + (of * TILE + (of ? wave & 1 : wave >> 1) * 64 + (lane & 31)) * STRIDE + (lane >> 5) * 16;
    load(0);
    store(0);
    __syncthreads();
    for (int k = 0; k < WIDTH; k += 2 * ROW) {
#pragma unroll
        for (int now = 0; now < 2; ++now) {
            load(k + (now + 1) * ROW);
#pragma unroll
            for (int part = 0; part < ROW; part += 32) {
                Four factors[2][2];
                for (int of = 0; of < 2; ++of)
                    for (int block = 0; block < 2; ++block)
                        factors[of][block] = *(const Four*)(read_from[of] + now * HALF + block * 32 * STRIDE + part);
                for (int pair = 0; pair < 2; ++pair)
                    for (int i = 0; i < 2; ++i)
                        for (int j = 0; j < 2; ++j)
                            sums[i][j] = multiplied(factors[0][i], factors[1][j], pair, sums[i][j]);
            }
            store(1 - now);
            __syncthreads();
        }
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j)
            for (int at = 0; at < 16; ++at) {
                const int y = blockIdx.y * TILE + (wave >> 1) * 64 + i * 32 + (lane >> 5) * 4 + at / 4 * 8 + at % 4;
                const int x = blockIdx.x * TILE + (wave & 1) * 64 + j * 32 + (lane & 31);
                if (y < m && x < N) c[(long)y * N + x] = __builtin_bit_cast(int, sums[i][j][at]);
            }
}
