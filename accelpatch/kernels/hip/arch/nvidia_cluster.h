// Clusters (Hopper on): blocks that write into each other's shared memory. Part of nvidia.h.
#pragma once

constexpr int CLUSTER = 2;  // blocks of one; 1: there are none. Four leave SMs without a block, so that others get two
// Stages of a multi-stage buffer in a cluster; fewer only where the deep one leaves no room: two kernels that alternate
// would push each other out of the instruction cache.
constexpr int CLUSTER_DEPTH = 3;
// With several scales a step, or offsets, eight tokens leave no room for a deep one.
template <class F> constexpr int CLUSTER_DEEP = F::QUANTIZES && F::GROUPS <= F::TILED && !F::OFFSET ? 4 : CLUSTER_DEPTH;
using Mbarrier = uint64_t;  // counts the bytes that were sent to it
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS_HERE = true;
DEVICE int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// One thread initialises an mbarrier; after cluster_arrive() by all threads and cluster_wait() any block may send to
// it.
DEVICE void init_mbarrier(Mbarrier& box) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(&box))
        : "memory");
}
DEVICE void cluster_arrive() {
    warp_sync();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// All threads of the cluster's blocks; what they wrote before it, others read behind it.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
// Where `here`, a place in shared memory, is in that of block `rank`.
template <class V> DEVICE V* beside(V* here, int rank) {
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return reinterpret_cast<V*>(there);
}
DEVICE uint32_t remote_address(const void* here, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}
// To where `at` and `box` are in the shared memory of block `rank`.
DEVICE void send4(float* at, Mbarrier& box, int rank, float v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote_address(at, rank)),
        "f"(v), "r"(remote_address(&box, rank))
        : "memory");
}
DEVICE void send16(void* at, Mbarrier& box, int rank, const float* v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     remote_address(at, rank)),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(remote_address(&box, rank))
        : "memory");
}
// Waits until `bytes` have come, which one thread (`first`) says. `parity`: 0 for the first time, then 1, then 0
// again.
DEVICE void receive(Mbarrier& box, bool first, int bytes, int parity) {
    if (first)
        asm volatile("{\n\t.reg .b64 s;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;\n\t}" ::"r"(
                         shared_address(&box)),
            "r"(bytes)
            : "memory");
    asm volatile(
        "{\n\t.reg .pred p;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@!p bra "
        "again;\n\t}" ::"r"(shared_address(&box)),
        "r"(parity)
        : "memory");
}
#else
#include "no_cluster.h"
DEVICE void cluster_sync() {}
template <class V> DEVICE V* beside(V* here, int) { return here; }
#endif
