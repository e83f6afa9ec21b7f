// In place of the kernels' nvidia.h: what attention takes of it, by PTX's own account of each instruction.
#pragma once
constexpr int WAVE = 32;
constexpr int BLOCKS_RESIDENT = 2;
constexpr bool SHARED_RING = true;
constexpr int RESERVED_SHARED = 1024;
#include "fibers.h"
#define COPIES
#include <deque>
#include <vector>

struct Copy { void* into; const void* source; int bytes; };  // source: null for zeros
extern std::deque<std::vector<Copy>> copies[];               // of a thread: its groups, the last one open
DEVICE void carry_out(const Copy& c) {
    if (c.source) std::memcpy(c.into, c.source, c.bytes);
    else std::memset(c.into, 0, c.bytes);
}
template <int BYTES> void stream_copy(void* into, const void* source, bool there) {
    aligned(into, BYTES);
    if (there) aligned(source, BYTES);
    const Copy copy{into, there ? source : nullptr, BYTES};
    if (fibers.late) copies[threadIdx.x].back().push_back(copy);
    else carry_out(copy);
}
DEVICE void ring_commit() { copies[threadIdx.x].emplace_back(); }
template <int DEPTH> void ring_wait() {
    auto& groups = copies[threadIdx.x];
    for (; groups.size() > DEPTH; groups.pop_front())
        for (const Copy& copy : groups.front()) carry_out(copy);
}
DEVICE void wave_sync() { meet(); }

constexpr int ROWS_PER_LANE = 2;
DEVICE int fragment_row(int i) { return (lane_id() >> 2) + 8 * i; }
DEVICE int fragment_quarter() { return lane_id() & 3; }
template <class T> struct FloatProduct {  // mma.m16n8k16
    static void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
        const auto all = exchange({a0, a2, a1, a3, b0, b1});
        for (int i = 0; i < 4; ++i) {
            const int row = (lane_id() >> 2) + 8 * (i >> 1), column = 2 * (lane_id() & 3) + (i & 1);
            double sum = c[i];
            for (int k = 0; k < 16; ++k) {
                const uint32_t a[2] = {all[row % 8 * 4 + k % 8 / 2][row / 8 * 2 + k / 8]}, b[2] = {all[column * 4 + k % 8 / 2][4 + k / 8]};
                sum += product<T>(a, b, k % 2);
            }
            c[i] = float(sum);
        }
    }
};
DEVICE uint32_t transposed(uint32_t v) {
    const auto all = exchange({v});
    const int row = lane_id() & 3, column = lane_id() >> 2;
    const auto at = [&](int r) { return all[r * 4 + column / 2][0] >> column % 2 * 16 & 0xffffu; };
    return at(2 * row) | at(2 * row + 1) << 16;
}
DEVICE void load_transposed(uint32_t* v, const Words4* row) {
    aligned(row, 16);
    const auto pointer = __builtin_bit_cast(uint64_t, row);
    const auto all = exchange({uint32_t(pointer), uint32_t(pointer >> 32)});
    for (int i = 0; i < 4; ++i) {
        const auto at = [&](int r) { return uint32_t(reinterpret_cast<const uint16_t*>(all[i * 8 + r][0] | uint64_t(all[i * 8 + r][1]) << 32)[lane_id() >> 2]); };
        v[i] = at(2 * (lane_id() & 3)) | at(2 * (lane_id() & 3) + 1) << 16;
    }
}
#include "nvidia_attention.h"
inline DeviceLimits device_limits() { return {fibers.processors, 232448, 233472}; }
