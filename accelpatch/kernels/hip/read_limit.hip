// The read limit: how fast this device streams a buffer when it does nothing else. Benchmarks divide by it.
#include "arch/portability.h"

namespace {
__global__ void __launch_bounds__(512) read_all(const uint4* __restrict__ from, int64_t vectors, uint32_t* sink) {
    constexpr int DEEP = 8;
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    uint32_t seen = 0;
    for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < vectors; at += stride * DEEP) {
        uint4 v[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; ++i) v[i] = at + i * stride < vectors ? from[at + i * stride] : uint4{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < DEEP; ++i) seen |= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    if (seen == 0x5eed5eedu) *sink = seen;  // practically never, but the compiler cannot know
}
}  // namespace

extern "C" int accelpatch_read_all(const void* from, int64_t bytes, void* sink, int blocks, void* stream) {
    read_all<<<blocks, 512, 0, static_cast<GpuStream>(stream)>>>(
        static_cast<const uint4*>(from), bytes / 16, static_cast<uint32_t*>(sink));
    return 0;
}
