// A block's threads as coroutines of one thread of the CPU, and what NVIDIA's and AMD's headers have alike. A lane runs
// on until it needs another: memory that lanes exchange without a barrier is then seen as it was. The header that
// includes it says WARP_SIZE.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using GpuStream = void*;
struct Group {  // of threads that share a named barrier
    int arrived = 0, times = 0;
    int arrive(int threads) {
        const int now = times;
        if (++arrived == threads) arrived = 0, ++times;
        return now;
    }
};
struct Emulator {
    Group groups[16];
    void (*yield)();
    int alive, at_barrier, barriers;    // of a block
    int at_meeting[32], meetings[32];   // of a warp
    uint32_t box[2][32][WARP_SIZE][6];  // what lanes give each other
    int sms;
    bool clusters;   // whether products of many tokens go by them
    bool late;       // asynchronous copies happen when they are waited for, or else at once
    bool backwards;  // the last thread first
    bool beside;     // blocks run beside each other, and not one after the other
};
extern Emulator emulator;
constexpr int MOST_CLUSTER = 16;  // blocks that run at once and reach each other's shared memory
struct Meeting : Group {
    int of, blocks, messages;
};
extern Meeting meeting;        // of all threads of a cluster
extern int most_delay;         // of what a block hands another, in stages of all threads
extern unsigned drawn;         // at random
extern int thread, arrived[];  // which of the cluster's threads runs; the meeting that each has come to
void run_blocks(int blocks, int cluster, int threads, int shared, const std::function<void()>& kernel);
char* in_block(char* here, int rank);  // where a place in shared memory is in that of another block

DEVICE int lane_id() { return int(threadIdx.x % WARP_SIZE); }
DEVICE void __syncthreads() {
    const int now = emulator.barriers;
    if (++emulator.at_barrier == emulator.alive) emulator.at_barrier = 0, ++emulator.barriers;
    else
        while (emulator.barriers == now) emulator.yield();
}
DEVICE void meet() {
    const int warp = int(threadIdx.x) / WARP_SIZE, now = emulator.meetings[warp];
    if (++emulator.at_meeting[warp] == WARP_SIZE) emulator.at_meeting[warp] = 0, ++emulator.meetings[warp];
    else
        while (emulator.meetings[warp] == now) emulator.yield();
}
// What each lane gave; it lasts until the next exchange but one.
template <int WORDS> auto exchange(const uint32_t (&mine)[WORDS]) {
    const int warp = int(threadIdx.x) / WARP_SIZE;
    auto& box = emulator.box[emulator.meetings[warp] % 2][warp];
    std::memcpy(box[lane_id()], mine, sizeof mine);
    meet();
    return &box[0];
}
template <class V> V lane_xor(V value, int mask) {
    uint32_t mine[1];
    std::memcpy(mine, &value, 4);
    std::memcpy(&value, exchange(mine)[lane_id() ^ mask], 4);
    return value;
}
DEVICE float from_lane(float value, int lane) {
    return __builtin_bit_cast(float, exchange({__builtin_bit_cast(uint32_t, value)})[lane][0]);
}
DEVICE uint32_t lane_vote(bool yes) {
    const auto all = exchange({uint32_t(yes)});
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= all[lane][0] << lane;
    return votes;
}
DEVICE uint32_t float_to_bf16(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
DEVICE uint32_t floats_to_bf16(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
DEVICE float half_to_float(uint32_t bits) { return float(__builtin_bit_cast(_Float16, uint16_t(bits))); }
DEVICE uint32_t float_to_half(float value) { return __builtin_bit_cast(uint16_t, _Float16(value)); }
DEVICE uint32_t floats_to_half(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
// e4m3, by what its codes are worth.
template <bool FNUZ> constexpr int E4M3_LEAST = FNUZ ? -7 : -6;  // exponent of a normal number, and of subnormals
template <bool FNUZ> double e4m3_value(uint32_t byte) {
    static const auto values = [] {
        std::vector<double> all(256);
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, units = exponent ? 8 + code % 8 : code % 8;
            const double v = std::ldexp(units, std::max(exponent, 1) - 4 + E4M3_LEAST<FNUZ>);
            const bool nan = FNUZ ? code == 0x80 : code % 128 == 127;
            all[code] = nan ? NAN : code >= 128 ? -v : v;
        }
        return all;
    }();
    return values[byte & 255u];
}
template <bool FNUZ> uint32_t e4m3_nearest(float v) {  // saturated
    if (v != v) return FNUZ ? 0x80 : 0x7f;
    const int exponent = v == 0 ? E4M3_LEAST<FNUZ> : std::max(std::min(std::ilogb(v), 20), E4M3_LEAST<FNUZ>);
    const double eighths = std::nearbyint(std::ldexp(std::min(std::abs(double(v)), 1e6), 3 - exponent));
    const int code = std::min(int(eighths) + (exponent - E4M3_LEAST<FNUZ>)*8, FNUZ ? 0x7f : 0x7e);
    return code | (std::signbit(v) && (code || !FNUZ) ? 0x80u : 0u);
}
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [&](int at) {
        return float_to_half(std::fma(
            half_to_float(a >> at & 0xffffu), half_to_float(b >> at & 0xffffu), half_to_float(c >> at & 0xffffu)));
    };
    return one(0) | one(16) << 16;
}
template <bool SIGNED> int sum_of_bytes(uint32_t bytes, int more) {
    for (int i = 0; i < 4; ++i) more += SIGNED ? int(int8_t(bytes >> 8 * i)) : int(uint8_t(bytes >> 8 * i));
    return more;
}
template <class V> void compute_here(V&) {}
inline bool block_any(bool yes, uint32_t& word) {
    if (yes) word = 1;
    __syncthreads();
    const bool any = word;
    __syncthreads();
    return any;
}
DEVICE uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) ^ bits; }
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) {
    return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}
template <uint32_t SELECT> uint32_t permute(uint32_t a, uint32_t b) {
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t((a | uint64_t(b) << 32) >> 8 * (SELECT >> 4 * i & 15u) & 255u) << 8 * i;
    return out;
}
DEVICE float rounded_multiply(float a, float b) { return a * b; }
DEVICE float fast_exp2(float v) { return std::exp2(v); }
DEVICE float fast_reciprocal(float v) { return 1.f / v; }
DEVICE float rsqrtf(float v) { return 1.f / std::sqrt(v); }
DEVICE int max(int v, int w) { return v > w ? v : w; }
DEVICE uint32_t max(uint32_t v, uint32_t w) { return v > w ? v : w; }
DEVICE uint32_t min(uint32_t v, uint32_t w) { return v < w ? v : w; }
DEVICE int min(int v, int w) { return v < w ? v : w; }
DEVICE int64_t min(int64_t v, int64_t w) { return v < w ? v : w; }
DEVICE void aligned(const void* pointer, int bytes) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes) std::abort();
}
DEVICE Words4 load_activation16(const void* source) { return aligned(source, 16), *static_cast<const Words4*>(source); }
DEVICE Words4 load_activation16(const void* source, bool there) {
    return there ? load_activation16(source) : Words4{0, 0, 0, 0};
}
DEVICE uint32_t load_activation2(const void* source) { return *static_cast<const uint16_t*>(source); }
DEVICE uint32_t load_activation4(const void* source) {
    return aligned(source, 4), *static_cast<const uint32_t*>(source);
}
DEVICE void store_activation2(void* into, uint32_t v) { *static_cast<uint16_t*>(into) = static_cast<uint16_t>(v); }
DEVICE uint32_t atomicOr(uint32_t* at, uint32_t bits) {
    const uint32_t before = *at;
    return *at |= bits, before;
}
DEVICE int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
// What a lane stores is there at a time of its own, and later from the first block.
inline void delay(int most) {
    if (!most) return;
    const int some = int((drawn = drawn * 1664525u + 1013904223u) >> 16) % most;
    for (int n = some + (blockIdx.x ? 0 : most); n > 0; --n) ++meeting.messages, emulator.yield();
}
extern int handed;  // words of 16 bytes, since they were counted
DEVICE void store_relaxed16(void* into, const Words4& v) {
    ++handed, aligned(into, 16), delay(most_delay), *static_cast<Words4*>(into) = v;
}
DEVICE Words4 load_relaxed16(const void* source) { return aligned(source, 16), *static_cast<const Words4*>(source); }
struct Owed {
    char* into;
    const char* from;
    int64_t bytes;
};  // what comes as it is looked for again, some at a time
extern Owed owed;
DEVICE void spin(int& looks) {
    if (++looks == 1 << 16) std::abort();
    for (bool come = false; owed.bytes;) {
        const int64_t some = std::min<int64_t>(owed.bytes, 256);
        const bool news = std::memcmp(owed.into, owed.from, size_t(some));
        if (news && come) break;
        std::memcpy(owed.into, owed.from, size_t(some)), owed.into += some, owed.from += some, owed.bytes -= some;
        come |= news, meeting.messages += news;
    }
    emulator.yield();
}
DEVICE void publish() {}
DEVICE int count_up(int32_t* counter, int by) { return (*counter += by) - by; }
struct Brought {
    const void* at;
    int64_t bytes;
};
extern std::vector<Brought> brought;  // since they were taken
inline void prefetch_l2(const void* source, int bytes) { brought.push_back({source, bytes}); }
inline void prefetch_line(const void*) {}
DEVICE void grid_release() {}
DEVICE void grid_wait() {}
DEVICE void linger() {}
template <bool> void signal_add(int32_t* number, int by) { *number += by; }
DEVICE void signal_wait(const int32_t* number, int enough, bool) {  // the kernel before has ended
    if (*number != enough) std::abort();
}
DEVICE int next_number(int32_t* number, int of) {
    const int now = *number;
    return *number = (now + 1) % of, now;
}

// Products of 16-bit floats, k'th of 16, from the words of those that hold them.
template <class T> double product(const uint32_t* a, const uint32_t* b, int k) {
    const uint32_t v = a[k / 2 % 2], w = b[k / 2 % 2];
    return k % 2 ? double(T::up_high(v)) * T::up_high(w) : double(T::up(v & 0xffffu)) * T::up(w & 0xffffu);
}

DEVICE void cluster_sync() {
    for (const int now = meeting.arrive(meeting.of); meeting.times == now;) emulator.yield();
}
template <class V> V* in_peer(V* here, int rank) {
    return reinterpret_cast<V*>(in_block(reinterpret_cast<char*>(here), rank));
}

struct DeviceLimits {
    int sms, shared_block, shared_sm;
    bool dependent_launch, clusters;
};
inline void clear(int32_t* number, GpuStream) { *number = 0; }
template <class... ARGS>
int launch_clusters(void (*kernel)(ARGS...), int cluster, int blocks, int threads, int shared, GpuStream,
    const DeviceLimits& limits, bool, ARGS... args) {
    if (shared > limits.shared_block || cluster > MOST_CLUSTER || blocks % cluster) std::abort();
    run_blocks(blocks, cluster, threads, shared, [=] { kernel(args...); });
    return 0;
}
template <class... ARGS>
int launch_kernel(void (*kernel)(ARGS...), int blocks, int threads, int shared, GpuStream stream,
    const DeviceLimits& limits, bool dependent, ARGS... args) {
    return launch_clusters(kernel, emulator.beside && blocks <= MOST_CLUSTER ? blocks : 1, blocks, threads, shared,
        stream, limits, dependent, args...);
}
