// In place of the kernels' amd.h, under the name of the other: its names, by the CDNA3 ISA's account.
#pragma once
constexpr int WARP_SIZE = 64;
constexpr int BLOCKS_RESIDENT = 1;
constexpr bool SHARED_STAGES = false;
constexpr bool LAUNCHES_OVERLAP = false;
constexpr bool BLOCKS_MEET = false;
constexpr int RESERVED_SHARED = 0;
#include "simt_emulator.h"
constexpr bool BOOK_IN_HALVES = false;
struct NibbleLookup {
    uint32_t word;
    explicit NibbleLookup(uint32_t word) : word(word) {}
    static constexpr int order(int e) { return e / 2 + e % 2 * 4; }
    static uint32_t perm(uint32_t high, uint32_t low, uint32_t bytes) {  // v_perm_b32, of places below 8
        uint32_t out = 0;
        for (int i = 0; i < 4; ++i)
            out |= (uint32_t((low | uint64_t(high) << 32) >> 8 * (bytes >> 8 * i & 7u)) & 255u) << 8 * i;
        return out;
    }
    void operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int odd, uint32_t* out) const {
        const uint32_t codes = odd ? word >> 4 : word, at = codes & 0x07070707u,
                       from = (codes >> 1 & 0x04040404u) | 0x03020100u;
        out[0] = perm(perm(d, c, at), perm(b, a, at), from);
    }
};
constexpr int CLUSTER = 1;
constexpr int CLUSTER_DEPTH = 1;
template <class F> constexpr int CLUSTER_DEEP = 1;
using Mbarrier = uint64_t;
#include "no_cluster.h"
DEVICE uint32_t transposed(uint32_t v) { return v; }

#if defined(__gfx90a__)
template <bool> constexpr bool E4M3_HERE = false;
#elif defined(__gfx950__)
template <bool FNUZ> constexpr bool E4M3_HERE = !FNUZ;
#else
template <bool FNUZ> constexpr bool E4M3_HERE = FNUZ;
#endif
constexpr bool OWN_FNUZ = E4M3_HERE<true>;
DEVICE uint32_t floats_to_e4m3(float a, float b, float c, float d) {
    return e4m3_nearest<OWN_FNUZ>(a) | e4m3_nearest<OWN_FNUZ>(b) << 8 | e4m3_nearest<OWN_FNUZ>(c) << 16 |
           e4m3_nearest<OWN_FNUZ>(d) << 24;
}
DEVICE void e4m3_to_halves(uint32_t, uint32_t&, uint32_t&) { std::abort(); }

template <int BYTES, int AT = 0> void stream_copy(void* into, const void* source, bool there) {
    if (there) aligned(source, BYTES), std::memcpy(into, source, BYTES);
    else std::memset(into, 0, BYTES);
}
DEVICE void commit_copies() {}
template <int> void wait_copies() {}
DEVICE void warp_sync() {}
DEVICE void copy_activation16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void stream_once16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void copies_done(int) {}
DEVICE void group_sync(int, int) { __syncthreads(); }
DEVICE void group_arrive(int, int) { __syncthreads(); }

template <class T>
void multiply_halves(float* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {  // v_mfma_f32_16x16x16
    const auto all = exchange({a0, a1, b0, b1});
    for (int i = 0; i < 4; ++i) {
        double more = sum[i];
        for (int k = 0; k < 16; ++k)
            more +=
                product<T>(all[4 * (lane_id() >> 4) + i + k / 4 * 16], all[(lane_id() & 15) + k / 4 * 16] + 2, k % 4);
        sum[i] = float(more);
    }
}
constexpr bool UNSIGNED_BYTES = false;
DEVICE void multiply_bytes(int* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {  // v_mfma_i32_16x16x32
    const auto all = exchange({a0, a1, b0, b1});
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k) {
            const auto byte = [&](int lane, int word) {
                return int(int8_t(all[lane + k / 8 * 16][word + k / 4 % 2] >> k % 4 * 8));
            };
            sum[i] += byte(4 * (lane_id() >> 4) + i, 0) * byte(lane_id() & 15, 2);
        }
}
DEVICE void multiply_e4m3(float* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {  // v_mfma_f32_16x16x32
    const auto all = exchange({a0, a1, b0, b1});
    for (int i = 0; i < 4; ++i) {
        double more = sum[i];
        for (int k = 0; k < 32; ++k) {
            const auto value = [&](int lane, int word) {
                return e4m3_value<OWN_FNUZ>(all[lane + k / 8 * 16][word + k / 4 % 2] >> k % 4 * 8);
            };
            more += value(4 * (lane_id() >> 4) + i, 0) * value(lane_id() & 15, 2);
        }
        sum[i] = float(more);
    }
}
#include "amd_mma.h"
#include "amd_attention.h"
inline DeviceLimits device_limits() { return {emulator.sms, 65536, 65536, false, false}; }
