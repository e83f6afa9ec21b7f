// All ranks of a job as blocks of one launch, and several launches of each one after the other: a rank may run ahead of
// the others as far as the kernel lets it.
#include "collective/push_all_reduce.h"

namespace {
struct Job {
    const PushArgs* launches;  // [rounds][world]
    int rounds, world, blocks;
};
template <class T, int RANKS> void ranks_kernel(Job job) {
    const int rank = int(blockIdx.x) / job.blocks, block = int(blockIdx.x) % job.blocks;
    for (int round = 0; round < job.rounds; ++round) {
        const PushArgs& a = job.launches[round * job.world + rank];
        if (int64_t(block) * VECTORS < a.vectors) push_and_add<T, RANKS>(a, block);
        __syncthreads();  // as between launches
    }
}
}  // namespace

extern "C" int run_ranks(const PushArgs* launches, int rounds, int world, int blocks, int dtype) {
    const Job job{launches, rounds, world, blocks};
    auto* const kernel = dtype == 0   ? (world == 2 ? ranks_kernel<Bf16, 2> : ranks_kernel<Bf16, 8>)
                         : dtype == 1 ? (world == 2 ? ranks_kernel<F16, 2> : ranks_kernel<F16, 8>)
                                      : (world == 2 ? ranks_kernel<F32, 2> : ranks_kernel<F32, 8>);
    return launch_kernel(kernel, world * blocks, VECTORS, 0, nullptr, device_limits(), false, job);
}
