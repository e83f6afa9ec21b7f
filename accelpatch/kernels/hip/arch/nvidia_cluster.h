// Clusters (Hopper on): blocks that write into each other's shared memory. Part of nvidia.h.
#pragma once

// Blocks of a cluster; 1: there are no clusters. Clusters of four would leave some SMs without a block and give others
// two.
constexpr int CLUSTER = 2;
// Stages of a multi-stage buffer in a cluster. Fewer are used only where shared memory has no room for these: two
// variants of a kernel in turn would evict each other from the instruction cache.
constexpr int CLUSTER_DEPTH = 3;
// The same for formats with one scale a step and no offset. With more tables eight tokens leave no room for four.
template <class F> constexpr int CLUSTER_DEEP = F::QUANTIZES && F::GROUPS <= F::TILED && !F::OFFSET ? 4 : CLUSTER_DEPTH;
using Mbarrier = uint64_t;  // an mbarrier object, which counts the bytes that asynchronous copies wrote
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS_HERE = true;
DEVICE int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Initialises an mbarrier for one arrival. Precondition: one thread calls it. Effect: once all threads of the cluster
// have passed cluster_arrive() and cluster_wait(), any block may send to it.
DEVICE void init_mbarrier(Mbarrier& box) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(&box))
        : "memory");
}
// Precondition: all threads of the block call it, then cluster_wait(). It orders no memory but what init_mbarrier
// fenced.
DEVICE void cluster_arrive() {
    warp_sync();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Barrier of all threads of the cluster, with release and acquire: what they wrote before it is visible after it.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
// The address, in the distributed shared memory of block `rank`, of what is at `here` in the caller's.
template <class V> DEVICE V* in_peer(V* here, int rank) {
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return reinterpret_cast<V*>(there);
}
DEVICE uint32_t remote_address(const void* here, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}
// Asynchronous store into block `rank`: v goes to what is at `at` there, and its bytes are counted by the mbarrier that
// is at `box` there. Precondition: that block has initialised the mbarrier, and has read what was at `at` before.
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
// Waits until `bytes` bytes have arrived at the mbarrier. Precondition: all threads that read them call it, exactly one
// with `first`, which announces the bytes. `parity`: 0 the first time, then 1, then 0 again. Effect: the bytes are
// visible to the callers.
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
template <class V> DEVICE V* in_peer(V* here, int) { return here; }
#endif
