// In place of the kernels' amd.h, under the name of the other: what attention takes of it, by the CDNA3 ISA's account.
#pragma once
constexpr int WAVE = 64;
constexpr int BLOCKS_RESIDENT = 1;
constexpr bool SHARED_RING = false;
constexpr int RESERVED_SHARED = 0;
#include "fibers.h"

template <int BYTES> void stream_copy(void* into, const void* source, bool there) {
    if (there) aligned(source, BYTES), std::memcpy(into, source, BYTES);
    else std::memset(into, 0, BYTES);
}
DEVICE void ring_commit() {}
template <int> void ring_wait() {}
DEVICE void wave_sync() {}
template <uint32_t SELECT> uint32_t permute(uint32_t a, uint32_t b) {
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t((a | uint64_t(b) << 32) >> 8 * (SELECT >> 4 * i & 15u) & 255u) << 8 * i;
    return out;
}

constexpr int ROWS_PER_LANE = 1;
DEVICE int fragment_row(int) { return lane_id() & 15; }
DEVICE int fragment_quarter() { return lane_id() >> 4; }
template <class T> struct MatrixProduct {  // v_mfma_f32_16x16x16
    float sum[4];
    void zero() { for (float& v : sum) v = 0.f; }
    void multiply(uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
        const auto all = exchange({a0, a1, b0, b1});
        for (int i = 0; i < 4; ++i) {
            double more = sum[i];
            for (int k = 0; k < 16; ++k) more += product<T>(all[4 * (lane_id() >> 4) + i + k / 4 * 16], all[(lane_id() & 15) + k / 4 * 16] + 2, k % 4);
            sum[i] = float(more);
        }
    }
};
#include "amd_attention.h"
inline DeviceLimits device_limits() { return {fibers.processors, 65536, 65536}; }
