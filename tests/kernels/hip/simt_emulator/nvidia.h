// In place of the kernels' nvidia.h: its names, by PTX's own account of each instruction.
#pragma once
#if defined(__ampere__)
#define __CUDA_ARCH__ 800
#endif
constexpr int WARP_SIZE = 32;
constexpr int BLOCKS_RESIDENT = 2;
constexpr bool SHARED_STAGES = true;
constexpr bool LAUNCHES_OVERLAP = true;
constexpr bool BLOCKS_MEET = true;
constexpr int RESERVED_SHARED = 1024;
#include "simt_emulator.h"
constexpr bool BOOK_IN_HALVES = true;
struct NibbleLookup {
    uint32_t word, inverted;
    explicit NibbleLookup(uint32_t word) : word(word), inverted(word ^ 0x88888888u) {}
    static constexpr int order(int e) { return e < 4 ? 2 * e : 2 * e - 7; }
    static uint32_t select(uint32_t a, uint32_t b, uint32_t nibbles) {  // prmt
        uint32_t out = 0;
        for (int i = 0; i < 4; ++i) {
            const uint32_t nibble = nibbles >> 4 * i & 15u,
                           byte = uint32_t((a | uint64_t(b) << 32) >> 8 * (nibble & 7u)) & 255u;
            out |= (nibble & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
        }
        return out;
    }
    void operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int half, uint32_t* out) const {
        out[0] = select(a, b, half ? word >> 16 : word), out[1] = select(c, d, half ? inverted >> 16 : inverted);
    }
};
constexpr int CLUSTER = 2;
constexpr int CLUSTER_DEPTH = 3;
template <class F> constexpr int CLUSTER_DEEP = F::QUANTIZES && F::GROUPS == 0 ? 4 : CLUSTER_DEPTH;
constexpr bool CLUSTERS_HERE = true;
struct alignas(8) Mbarrier {
    int32_t due;
    uint16_t times;
    bool announced;
};  // due: bytes
DEVICE void cluster_arrive() { arrived[thread] = meeting.arrive(meeting.of); }
DEVICE void cluster_wait() {
    while (meeting.times == arrived[thread]) emulator.yield();
}
DEVICE int cluster_rank() { return int(blockIdx.x) % meeting.blocks; }
DEVICE void init_mbarrier(Mbarrier& box) { box = {}; }
DEVICE void count(Mbarrier& box, int bytes) {
    ++meeting.messages;
    if ((box.due += bytes) == 0 && box.announced) box.announced = false, ++box.times;
}
template <int FLOATS> void send(float* at, Mbarrier& box, int rank, const float* v) {
    std::memcpy(in_peer(at, rank), v, 4 * FLOATS);
    count(*in_peer(&box, rank), -4 * FLOATS);
}
DEVICE void send4(float* at, Mbarrier& box, int rank, float v) { send<1>(at, box, rank, &v); }
DEVICE void send16(void* at, Mbarrier& box, int rank, const float* v) {
    aligned(at, 16), delay(most_delay), send<4>(static_cast<float*>(at), box, rank, v);
}
DEVICE void receive(Mbarrier& box, bool first, int bytes, int parity) {
    if (first) {
        if (box.announced) std::abort();
        box.announced = true, count(box, bytes);
    }
    while (box.times % 2 == parity) emulator.yield();
}
template <class... ARGS> int most_clusters(void (*)(ARGS...), const DeviceLimits& limits) {
    return limits.sms / CLUSTER;
}
template <bool FNUZ> constexpr bool E4M3_HERE = !FNUZ;
DEVICE uint32_t floats_to_e4m3(float a, float b, float c, float d) {
    return e4m3_nearest<false>(a) | e4m3_nearest<false>(b) << 8 | e4m3_nearest<false>(c) << 16 |
           e4m3_nearest<false>(d) << 24;
}
DEVICE void e4m3_to_halves(uint32_t bytes, uint32_t& low, uint32_t& high) {
    const auto half = [bytes](int i) { return float_to_half(float(e4m3_value<false>(bytes >> 8 * i))); };
    low = half(0) | half(1) << 16, high = half(2) | half(3) << 16;
}
#define COPIES
#include <deque>
#include <vector>

struct Copy {
    void* into;
    const void* source;
    int bytes;
};  // source: null for zeros
extern std::deque<std::vector<Copy>> copies[];  // of a thread: its groups, the last one open
extern int zeros;                               // copies of nothing, since they were taken
DEVICE void carry_out(const Copy& c) {
    if (c.source) std::memcpy(c.into, c.source, c.bytes);
    else std::memset(c.into, 0, c.bytes);
}
template <int BYTES, int AT = 0> void stream_copy(void* into, const void* source, bool there) {
    aligned(into, BYTES);
    if (there) aligned(source, BYTES);
    else ++zeros;
    const Copy copy{static_cast<char*>(into) + AT, there ? static_cast<const char*>(source) + AT : nullptr, BYTES};
    if (emulator.late) copies[thread].back().push_back(copy);
    else carry_out(copy);
}
DEVICE void commit_copies() { copies[thread].emplace_back(); }
template <int DEPTH> void wait_copies() {
    auto& groups = copies[thread];
    for (; groups.size() > DEPTH; groups.pop_front())
        for (const Copy& copy : groups.front()) carry_out(copy);
}
DEVICE void copy_activation16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void stream_once16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void copies_done(int but) { but == 2 ? wait_copies<3>() : but == 1 ? wait_copies<2>() : wait_copies<1>(); }
DEVICE void warp_sync() { meet(); }
DEVICE void group_arrive(int name, int threads) { emulator.groups[name].arrive(threads); }
DEVICE void group_sync(int name, int threads) {
    for (const int now = emulator.groups[name].arrive(threads); emulator.groups[name].times == now;) emulator.yield();
}

// mma.m16n8k16 and m16n8k32: the words of a row or column that hold values of K, and a lane's four sums.
template <int EACH, class SUM, class TERM>
void multiply(SUM* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, TERM term) {
    const auto all = exchange({a0, a2, a1, a3, b0, b1});
    for (int i = 0; i < 4; ++i) {
        const int row = (lane_id() >> 2) + 8 * (i >> 1), column = 2 * (lane_id() & 3) + (i & 1);
        for (int k = 0; k < 8 * EACH; ++k) {
            const int quarter = k % (4 * EACH) / EACH, half = k / (4 * EACH);
            c[i] += term(all[row % 8 * 4 + quarter][row / 8 * 2 + half], all[column * 4 + quarter][4 + half], k % EACH);
        }
    }
}
template <class T>
void multiply_halves(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    double sums[4] = {c[0], c[1], c[2], c[3]};
    multiply<2>(sums, a0, a1, a2, a3, b0, b1, [](uint32_t a, uint32_t b, int k) { return product<T>(&a, &b, k); });
    for (int i = 0; i < 4; ++i) c[i] = float(sums[i]);
}
constexpr bool UNSIGNED_BYTES = true;
DEVICE void multiply_bytes(
    int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, bool sign) {
    multiply<4>(c, a0, a1, a2, a3, b0, b1, [sign](uint32_t a, uint32_t b, int k) {
        return int(int8_t(a >> 8 * k)) * (sign ? int(int8_t(b >> 8 * k)) : int(uint8_t(b >> 8 * k)));
    });
}
DEVICE void multiply_bytes(int* c, uint32_t a0, uint32_t a1, uint32_t b) {  // m16n8k16
    const auto all = exchange({a0, a1, b});
    for (int i = 0; i < 4; ++i) {
        const int row = (lane_id() >> 2) + 8 * (i >> 1), column = 2 * (lane_id() & 3) + (i & 1);
        for (int k = 0; k < 16; ++k)
            c[i] += int(int8_t(all[row % 8 * 4 + k / 4][row / 8] >> 8 * (k % 4))) *
                    int(uint8_t(all[column * 4 + k / 4][2] >> 8 * (k % 4)));
    }
}
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
        const auto at = [&](int r) {
            return uint32_t(reinterpret_cast<const uint16_t*>(
                all[i * 8 + r][0] | uint64_t(all[i * 8 + r][1]) << 32)[lane_id() >> 2]);
        };
        v[i] = at(2 * (lane_id() & 3)) | at(2 * (lane_id() & 3) + 1) << 16;
    }
}
#include "nvidia_mma.h"
#include "nvidia_attention.h"
inline DeviceLimits device_limits() { return {emulator.sms, 232448, 233472, true, emulator.clusters}; }
