// The weights' way to the matrix unit: a ring of steps, each private to its lane, so that no barrier guards it.
// NVIDIA: asynchronous copies into shared memory, as deep as memory allows. AMD: registers, by an unrolled loop.
#pragma once
#include "portability.h"

#if ACCELPATCH_AMD
using Vector4 = uint32_t __attribute__((ext_vector_type(4)));
using Vector2 = uint32_t __attribute__((ext_vector_type(2)));
#define ACCELPATCH_GLOBAL __attribute__((address_space(1)))  // said outright, or a pointer that loops back makes it a flat load
template <int BYTES> DEVICE void stream_load(uint32_t* into, const void* source) {
    if constexpr (BYTES == 16) {
        const Vector4 v = __builtin_nontemporal_load((const ACCELPATCH_GLOBAL Vector4*)source);
        for (int i = 0; i < 4; ++i) into[i] = v[i];
    } else if constexpr (BYTES == 8) {
        const Vector2 v = __builtin_nontemporal_load((const ACCELPATCH_GLOBAL Vector2*)source);
        into[0] = v[0], into[1] = v[1];
    } else {
        into[0] = __builtin_nontemporal_load((const ACCELPATCH_GLOBAL uint32_t*)source);
    }
}
DEVICE void wait_all() {}
#else
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
template <int BYTES> DEVICE void stream_copy(void* into, const void* source) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(into)), "l"(source) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(into)), "l"(source), "n"(BYTES) : "memory");
    }
}
DEVICE void ring_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_pending() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void wait_all() { wait_pending<0>(); }
// Waits for the oldest of four turns, or of two.
DEVICE void ring_wait(bool four) {
    if (four) wait_pending<3>();
    else wait_pending<1>();
}
#endif
