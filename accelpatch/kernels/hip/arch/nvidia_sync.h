// Order between threads, blocks and launches: dependent launch, signals, named barriers, counters. Part of nvidia.h.
#pragma once

DEVICE void grid_release() {  // the next kernel may start
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void grid_wait() {  // for the kernel before to end
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Adds to a number that another kernel waits for. With ORDER: after all that the block wrote before a barrier. Without,
// which is faster, it may come first: who then reads a word that is still SENTINEL reads it again.
template <bool ORDER> DEVICE void signal_add(int32_t* number, int by) {
    if constexpr (ORDER) asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(number), "r"(by) : "memory");
    else asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(number), "r"(by) : "memory");
}
// One thread waits until a number of the kernel before has come so far; behind a barrier all threads may read what it
// signals in that order. After some hundred microseconds it waits for that kernel's end instead, should it not signal
// at all.
DEVICE void signal_wait(const int32_t* number, int enough, bool order) {
#pragma unroll 1
    for (int patience = 0; patience < 2048; ++patience) {
        int now;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
            : "=r"(now)
            : "l"(number)
            : "memory");  // acquiring each time would empty L1 each time
        if (now >= enough) {
            if (order) asm volatile("fence.acq_rel.gpu;" ::: "memory");
            return;
        }
        __nanosleep(64);
    }
    grid_wait();
}
// Words that blocks of a launch exchange, each whole by itself.
DEVICE void store_relaxed16(void* into, const Words4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(into), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
DEVICE Words4 load_relaxed16(const void* source) { return load_activation16(source); }
// Between two looks for what another block of the launch stores. Looking in vain for many seconds ends in an error.
DEVICE void spin(int& looks) {
    if (++looks == 1 << 24) asm volatile("trap;");
    __nanosleep(20);
}
// 0, 1 and so on to `of` less one, a call each; then from zero again.
DEVICE int next_number(int32_t* number, int of) { return int(atomicInc(reinterpret_cast<unsigned*>(number), of - 1)); }
// A barrier of `threads` threads that share `name` (0 to 7); those that only arrive go on at once.
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

DEVICE void publish() {}  // what this thread wrote, before a barrier and count_up(): those two do
// Adds after all that the block published before a barrier and before all that it reads behind one; what was there.
DEVICE int count_up(int32_t* counter, int by) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
    return before;
}
