// The weights' way to the matrix unit: a ring of steps, each private to its lane, so that no barrier guards it.
// NVIDIA: asynchronous copies into shared memory, as deep as memory allows. AMD: registers, by an unrolled loop.
#pragma once
#include "portability.h"

#if ACCELPATCH_AMD
using Vector4 = uint32_t __attribute__((ext_vector_type(4)));
using Vector2 = uint32_t __attribute__((ext_vector_type(2)));
template <int BYTES> DEVICE void stream_load(uint32_t* into, const void* source) {
    if constexpr (BYTES == 16) {
        const Vector4 v = __builtin_nontemporal_load(static_cast<const Vector4*>(source));
        for (int i = 0; i < 4; ++i) into[i] = v[i];
    } else if constexpr (BYTES == 8) {
        const Vector2 v = __builtin_nontemporal_load(static_cast<const Vector2*>(source));
        into[0] = v[0], into[1] = v[1];
    } else {
        into[0] = __builtin_nontemporal_load(static_cast<const uint32_t*>(source));
    }
}
#else
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
// Copies `valid` of BYTES bytes and fills the rest with zeros.
template <int BYTES> DEVICE void stream_copy(void* into, const void* source, int valid) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(into)), "l"(source),
                     "r"(valid) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(into)), "l"(source),
                     "r"(valid), "n"(BYTES) : "memory");
    }
}
DEVICE void ring_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_pending() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Waits for the oldest of `depth` turns.
DEVICE void ring_wait(int depth) {
    if (depth >= 8) wait_pending<7>();
    else if (depth >= 6) wait_pending<5>();
    else if (depth >= 4) wait_pending<3>();
    else if (depth >= 3) wait_pending<2>();
    else wait_pending<1>();
}
#endif
