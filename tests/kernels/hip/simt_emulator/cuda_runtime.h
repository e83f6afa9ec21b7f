// Names of the CUDA runtime that kernels use, for a compiler of the CPU.
#pragma once
#include <cstdint>
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
struct Place {
    unsigned x;
};
extern Place threadIdx, blockIdx, gridDim;
