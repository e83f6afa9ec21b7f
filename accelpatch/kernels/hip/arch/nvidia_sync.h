// Synchronisation of threads, blocks and launches: dependent launch, signals, named barriers, counters. Part of
// nvidia.h.
#pragma once

// Programmatic dependent launch: the next kernel may start once every block has called it or ended. It makes no stores
// visible.
DEVICE void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all kernels before this launch have ended and their stores are visible.
DEVICE void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Adds to a counter that another kernel waits for. With ORDER it is a release: what the block stored before a barrier
// is visible to a kernel that acquires the counter. Without, which is faster, the counter may be seen before the
// stores; the reader must then load again what is still SENTINEL.
template <bool ORDER> DEVICE void signal_add(int32_t* number, int by) {
    if constexpr (ORDER) asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(number), "r"(by) : "memory");
    else asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(number), "r"(by) : "memory");
}
// Waits until a counter of the kernel before is at least `enough`. Precondition: one thread calls it, and a barrier
// follows. order: an acquire, after which all threads see what the signal released. After some hundred microseconds it
// waits for that kernel's end instead, in case it does not signal at all.
DEVICE void signal_wait(const int32_t* number, int enough, bool order) {
#pragma unroll 1
    for (int patience = 0; patience < 2048; ++patience) {
        int now;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
            : "=r"(now)
            : "l"(number)
            : "memory");  // relaxed, since each acquire would invalidate L1
        if (now >= enough) {
            if (order) asm volatile("fence.acq_rel.gpu;" ::: "memory");
            return;
        }
        __nanosleep(64);
    }
    grid_wait();
}
// Relaxed stores and loads of words that blocks of one launch exchange. Each 32-bit word is whole; nothing is ordered.
DEVICE void store_relaxed16(void* into, const Words4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(into), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
DEVICE Words4 load_relaxed16(const void* source) { return load_activation16(source); }
// Backs off between two loads of what another block of the launch will store. After many seconds without it the kernel
// traps.
DEVICE void spin(int& looks) {
    if (++looks == 1 << 24) asm volatile("trap;");
    __nanosleep(20);
}
// A counter's next number: 0, 1 and so on to of - 1, then 0 again.
DEVICE int next_number(int32_t* number, int of) { return int(atomicInc(reinterpret_cast<unsigned*>(number), of - 1)); }
// A named barrier of `threads` threads, `name` 0 to 7. group_sync waits; group_arrive counts the caller and returns at
// once. What all these threads stored before it is visible to those that wait.
DEVICE void group_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name + 1), "r"(threads) : "memory");
}
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void linger() {  // a microsecond
#if __CUDA_ARCH__ >= 700
    __nanosleep(1000);
#endif
}
DEVICE void group_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name + 1), "r"(threads) : "memory");
}

DEVICE void publish() {}  // nothing: a barrier and then count_up() publish what the block wrote
// Adds to a counter and returns what it was, with acquire and release: what the block published before a barrier is
// visible to those that count later, and what those before have published is visible to the block after a barrier.
DEVICE int count_up(int32_t* counter, int by) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
    return before;
}
