// What threads do together: lanes of a wave, LDS, atomics, addresses of any memory.
#include <hip/hip_runtime.h>

extern "C" __global__ void shuffles(const int* in, int* out) {
    const int lane = threadIdx.x, v = in[lane];
    int* o = out + 14 * lane;
    o[0] = __shfl_xor(v, 5), o[1] = __shfl_up(v, 3), o[2] = __shfl_down(v, 7), o[3] = __shfl(v, (lane * 11) & 63);
    o[4] = int(__popcll(__ballot(v & 1))), o[5] = __any(v == 3) | __all(v > -100000) << 1;
    o[6] = __builtin_amdgcn_update_dpp(-1, v, 0x111, 0xf, 0xf, false);  // row_shr:1
    o[7] = __builtin_amdgcn_update_dpp(-1, v, 0x142, 0xa, 0xf, false);  // row_bcast:15, rows 1 and 3
    o[8] = __builtin_amdgcn_update_dpp(0, v, 0x1b, 0xf, 0xf, true);     // quad_perm:[3,2,1,0]
    o[9] = __builtin_amdgcn_update_dpp(-7, v, 0x140, 0xf, 0x5, true);   // row_mirror, banks 0 and 2
    o[10] = __builtin_amdgcn_ds_swizzle(v, 0x041f);                     // lane ^ 1
    o[11] = __builtin_amdgcn_readfirstlane(v) + __builtin_amdgcn_readlane(v, 17);
    o[12] = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    int some = 0;
    if (lane % 3 == 1) some = __shfl(v, lane ^ 3) + __builtin_amdgcn_readfirstlane(v);
    o[13] = lane % 3 == 1 && (lane ^ 3) % 3 == 1 ? some : 0;
}
// The sum of a wave by DPP, as rocPRIM has it.
extern "C" __global__ void wave_sum(const float* in, float* out) {
    float v = in[threadIdx.x];
#define STEP(control) \
    v += __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, v), control, 0xf, 0xf, true))
    STEP(0x111);
    STEP(0x112);
    STEP(0x114);
    STEP(0x118);
    STEP(0x142);
    STEP(0x143);
    if (threadIdx.x == 63) *out = v;
}
extern "C" __global__ void block_sum(const float* in, float* out, int n) {
    __shared__ float partial[256];
    float v = 0;
    for (int i = threadIdx.x; i < n; i += 256) v += in[blockIdx.x * n + i];
    partial[threadIdx.x] = v;
    for (int s = 128; s > 0; s >>= 1) {
        __syncthreads();
        if (int(threadIdx.x) < s) partial[threadIdx.x] += partial[threadIdx.x + s];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}
// LDS of the launch's size: each thread's number by value, and counts by LDS atomics.
extern "C" __global__ void histogram(const unsigned char* in, int* out, int n) {
    extern __shared__ int counts[];
    for (int i = threadIdx.x; i < 64; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&counts[in[i] & 63], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < 64; i += blockDim.x) out[i] = counts[i] * 2 + (counts[i ^ 1] & 1);
}
extern "C" __global__ void atomics(int* ints, unsigned long* longs, float* floats, const int* in) {
    const int v = in[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(ints, v), atomicMax(ints + 1, v), atomicMin(ints + 2, v), atomicOr(ints + 3, v), atomicAnd(ints + 4, v);
    atomicXor(ints + 5, v), atomicSub(ints + 6, v);
    __builtin_amdgcn_atomic_inc32((unsigned*)ints + 7, 10u, __ATOMIC_RELAXED, "agent");
    atomicAdd(longs, (unsigned long)(long)(v)), atomicMax((unsigned long long*)longs + 1, (unsigned long long)v * v);
    atomicAdd(floats, float(v & 15));
    int old = ints[8], seen;  // a product by compare and swap
    do seen = old, old = atomicCAS(ints + 8, seen, seen * 3 + 1);
    while (old != seen);
    floats[1 + (atomicAdd(ints + 9, 1) & 511)] = 1.f;  // each its own place
    atomicExch(ints + 10, 5);
}
// Pointers of which nobody knows what memory they are of, and narrow and wide accesses.
struct Three {
    int x, y, z;
};
extern "C" __global__ void addresses(const short* shorts, const signed char* bytes, const Three* threes, int* out) {
    __shared__ int local[64];
    const int lane = threadIdx.x;
    local[lane ^ 1] = shorts[lane] * 3;
    out[lane + 64] = bytes[lane];
    __syncthreads();
    int* volatile generic = lane % 3 ? local : out + 64;
    const Three t = threes[lane];
    out[lane] = generic[lane] + t.x * t.y + t.z;
    reinterpret_cast<unsigned char*>(out + 128)[lane] = static_cast<unsigned char>(t.x);
    reinterpret_cast<short*>(out + 160)[lane] = static_cast<short>(t.y);
    int* volatile into = lane % 2 ? local : out + 192;
    into[lane] = t.z;
    __syncthreads();
    if (lane % 2) out[192 + lane] = local[lane] + 1;
}
extern "C" __global__ void grid(int* out) {
    const int place = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[place * blockDim.x * blockDim.y * blockDim.z + thread] =
        threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * (blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z);
}
