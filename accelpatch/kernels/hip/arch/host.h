// What the launches have in common on the host: status codes, limits, roundings.
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

constexpr int64_t LARGEST = int64_t(1) << 31;

inline bool multiple_of_16(const void* pointer, int64_t stride_bytes = 0) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride_bytes % 16 == 0;
}

// Whether 16-bit values come in aligned pairs.
inline bool pairs(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 4 == 0 && stride % 2 == 0;
}

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Parts of a block's shared memory one after the other, each on a boundary of 128 bytes.
struct SharedLayout {
    int64_t bytes = 0;
    int32_t reserve(int64_t more) {
        const int64_t at = bytes;
        bytes += round_up(more, 128);
        return int32_t(at);
    }
};

// A kernel takes at most half an SM, so that its successor finds room; more where it cannot do with less.
inline int64_t half_of(const DeviceLimits& limits) { return limits.shared_sm / 2 - RESERVED_SHARED; }
