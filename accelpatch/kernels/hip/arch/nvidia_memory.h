// Loads, stores and asynchronous copies, and which caches each uses. Part of nvidia.h.
#pragma once

DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
// Loads what another kernel may just have written, from L2 and never from a stale line of L1.
DEVICE Words4 load_activation16(const void* source) {
    Words4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(source)
        : "memory");
    return v;
}
// The same, without a branch; zeros, and no access to memory, where not `there`.
DEVICE Words4 load_activation16(const void* source, bool there) {
    Words4 v;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 "
        "%3, 0;\n\t"
        "@p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(source), "r"(int(there))
        : "memory");
    return v;
}
DEVICE uint32_t load_activation2(const void* source) {
    uint16_t v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(source) : "memory");
    return v;
}
DEVICE uint32_t load_activation4(const void* source) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
    return v;
}
// A relaxed store of what the next kernel may read before this one has ended. It may read 16 bytes at a time: PTX does
// not define such a race of two sizes, but an aligned half is whole in L2, which all of these accesses go to.
DEVICE void store_activation2(void* into, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(into), "h"(static_cast<uint16_t>(v)) : "memory");
}
// Starts an asynchronous copy of BYTES into shared memory; of zeros, without access to memory, where not `there`. AT:
// an offset of both addresses. Effect: the bytes are visible to this thread after wait_copies(), to others after a
// barrier behind it.
template <int BYTES, int AT = 0> DEVICE void stream_copy(void* into, const void* source, bool there) {
    static_assert(AT == 0 || BYTES == 16, "whole pieces alone lie behind each other");
    const int bytes = there ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0+%3], [%1+%3], 16, %2;" ::"r"(shared_address(into)),
            "l"(source), "r"(bytes), "n"(AT)
            : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(into)), "l"(source),
            "n"(BYTES), "r"(bytes)
            : "memory");
    }
}
// The same for 16 bytes that are read once: L2 evicts them first, so that masks and what blocks exchange stay there.
// The exclusive or is with a zero that ptxas does not know. Without it ptxas kept part of the address in a uniform
// register that overwrote half of the policy, and the kernel ended with an illegal instruction (CUDA 13.0).
DEVICE void stream_once16(void* into, const void* source, bool there) {
    asm volatile(
        "{\n\t.reg .b64 once;\n\tcreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n\t"
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, once;\n\t}" ::"r"(
            shared_address(into) ^ blockIdx.z),
        "l"(source), "r"(there ? 16 : 0)
        : "memory");
}
// The same for 16 bytes of activations, which another kernel may just have written: they come from L2.
DEVICE void copy_activation16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until this thread's copies of the oldest of DEPTH stages have arrived.
template <int DEPTH> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
// Waits for all of this thread's copies but those of the last `but` stages, at most two.
DEVICE void copies_done(int but) { but == 2 ? wait_copies<3>() : but == 1 ? wait_copies<2>() : wait_copies<1>(); }

DEVICE void prefetch_l2(const void* source, int bytes) {  // pieces of 16 bytes
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

DEVICE void prefetch_line(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory"); }
