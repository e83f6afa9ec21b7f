// A few words of HIP for a compiler of the CPU: each thread of a block is a thread, and a row of threads (threadIdx.y)
// exchanges values at a barrier of its own. For small kernels in tests; its includer is compiled as C++20.
#pragma once
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__

struct Place {
    unsigned x, y, z;
};
inline thread_local Place threadIdx, blockIdx;
inline Place blockDim;

namespace emulated {
inline std::vector<std::unique_ptr<std::barrier<>>> rows;
inline std::vector<float> lanes;
}  // namespace emulated

inline float __shfl_down(float value, int step, int width) {
    std::barrier<>& row = *emulated::rows[threadIdx.y];
    float* lanes = &emulated::lanes[threadIdx.y * blockDim.x];
    lanes[threadIdx.x] = value;
    row.arrive_and_wait();
    unsigned from = threadIdx.x + step;
    float found = from / width == threadIdx.x / width ? lanes[from] : value;
    row.arrive_and_wait();
    return found;
}

template <typename Kernel> void launch(Place grid, Place block, Kernel kernel) {
    blockDim = block;
    emulated::lanes.assign(block.x * block.y, 0.0f);
    for (unsigned b = 0; b < grid.x * grid.y; ++b) {
        emulated::rows.clear();
        for (unsigned y = 0; y < block.y; ++y) emulated::rows.push_back(std::make_unique<std::barrier<>>(block.x));
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < block.x * block.y; ++t)
            threads.emplace_back([=] {
                threadIdx = {t % block.x, t / block.x, 0}, blockIdx = {b % grid.x, b / grid.x, 0};
                kernel();
            });
        for (std::thread& one : threads) one.join();
    }
}
