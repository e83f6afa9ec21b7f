// Memory that another GPU reads or writes while a kernel runs: relaxed loads and stores of 16 bytes at system scope.
// Each of the four 32-bit words is loaded and stored as a whole; they may become visible in any order.
#pragma once
#include "portability.h"

#if defined(__HIP__)
DEVICE void store_system16(void* into, const Words4& v) {
    auto* to = static_cast<uint64_t*>(into);
    __hip_atomic_store(to, v.x | uint64_t(v.y) << 32, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    __hip_atomic_store(to + 1, v.z | uint64_t(v.w) << 32, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEVICE Words4 load_system16(const void* source) {
    auto* from = static_cast<const uint64_t*>(source);
    const uint64_t low = __hip_atomic_load(from, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    const uint64_t high = __hip_atomic_load(from + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}
// Pauses a thread that has loaded in vain. The argument is the number of loads so far.
DEVICE void backoff(int) { __builtin_amdgcn_s_sleep(1); }
#else
DEVICE void store_system16(void* into, const Words4& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(into), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
DEVICE Words4 load_system16(const void* source) {
    Words4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(source)
        : "memory");
    return v;
}
DEVICE void backoff(int) {}  // the wait is under a microsecond, and a pause would not be much shorter
#endif
