// Host code that all launches share: status codes, alignment checks, the layout of shared memory.
#pragma once
#include "portability.h"

enum Status : int {
    STATUS_OK = 0,
    STATUS_SIZE = 1,
    STATUS_POINTER = 2,
    STATUS_MEMORY = 3,
    STATUS_FORMAT = 4,
    STATUS_DEVICE = 1000
};

constexpr int64_t LARGEST = int64_t(1) << 31;  // sizes must be below it

inline bool multiple_of_16(const void* pointer, int64_t stride_bytes = 0) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride_bytes % 16 == 0;
}

// Whether each row of 16-bit values can be accessed in aligned pairs. stride: in values.
inline bool pairs(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 4 == 0 && stride % 2 == 0;
}

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Lays out parts of a block's shared memory one after another, each at a multiple of 128 bytes.
struct SharedLayout {
    int64_t bytes = 0;
    int32_t reserve(int64_t more) {
        const int64_t at = bytes;
        bytes += round_up(more, 128);
        return int32_t(at);
    }
};

// Half of an SM's shared memory, less what the driver reserves. A kernel uses no more where it can, so that a block of
// the next kernel has room on the SM too.
inline int64_t half_sm_bytes(const DeviceLimits& limits) { return limits.shared_sm / 2 - RESERVED_SHARED; }
