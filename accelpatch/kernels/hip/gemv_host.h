// Host side: limits, the plan of shared memory, the launch. Every limit is checked here, in 64-bit arithmetic.
#pragma once
#include "gemv_kernel.h"

enum Status : int { STATUS_OK = 0, STATUS_SIZE = 1, STATUS_POINTER = 2, STATUS_MEMORY = 3, STATUS_FORMAT = 4, STATUS_DEVICE = 1000 };

constexpr int64_t LARGEST = int64_t(1) << 31;

inline int check(const GemvArgs& a) {
    if (a.m < 0 || a.m > 8 || a.n < 1 || a.k < 1 || a.n >= LARGEST || a.k >= LARGEST / 16) return STATUS_SIZE;
    if (a.activation == ACT_SILU_GATE && a.n % 2) return STATUS_SIZE;
    if (a.m && (!a.w || !a.x || !a.y)) return STATUS_POINTER;
    return STATUS_OK;
}

inline bool multiple_of_16(const void* pointer, int64_t stride_bytes = 0) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride_bytes % 16 == 0;
}

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Whether four or eight waves share a tile: whichever has the busiest wave take fewer turns, a tile's end counted as one.
template <class F> int waves_shift(const GemvPlan& p, int blocks) {
    int64_t turns[2];
    for (const int shift : {2, 3}) {
        const int64_t tiles = (p.tiles + blocks - 1) / blocks, at_once = WAVES >> shift, each = (p.steps + PAIR<F> - 1) / PAIR<F>;
        turns[shift - 2] = (tiles + at_once - 1) / at_once * (((each + (1 << shift) - 1) >> shift) + 1);
    }
    return turns[1] < turns[0] ? 3 : 2;
}

// Where everything lies for `resident` phases and a ring of `depth`; the bytes in all.
template <class F, class T> int64_t lay_out(GemvPlan& p, const GemvArgs& a, bool narrow, int depth) {
    const int64_t steps = round_up(p.resident == p.phases ? p.steps : p.phase_steps, PAIR<F>), values = round_up(steps * F::KSTEP, 128);
    const int64_t waves = 1 << p.waves_shift;
    int64_t at = 0;
    const auto take = [&](int64_t bytes) { return int32_t((at += round_up(bytes, 128)) - round_up(bytes, 128)); };
    int64_t pad = 16;
    if constexpr (!F::INTEGER) pad = F::TOKEN_PAD;
    p.token_stride = int32_t(values * 2 + pad);
    take(p.token_stride * a.m);
    p.powers_at = take(F::INTEGER ? values / 128 * 32 : 0);
    p.sums_at = take(F::OFFSET != OFFSET_NONE ? steps * F::GROUPS * 32 : 0);
    p.moments_at = take(Norms<T>::FLOATS * 4);
    p.partial_buffers = int32_t(narrow ? waves : depth == DEEP ? 2 : 1);  // where memory is short, a second barrier instead
    p.partial_at = take(p.partial_buffers * a.m * WAVES * PARTIAL_STRIDE * 4);
    p.ring_at = take(SHARED_RING ? int64_t(depth) * PAIR<F> * SLOT_BYTES<F> * WAVES : 0);
    return at;
}

// Lays out one launch of up to 8 tokens on so many blocks; the ring's depth, 0 where even the smallest does not fit.
template <class F, class T> int make_plan(GemvPlan& p, const GemvArgs& a, const DeviceLimits& limits, int blocks, bool narrow) {
    const bool gate = a.activation == ACT_SILU_GATE;
    const int64_t rows = gate ? a.n / 2 : a.n, each = gate ? 8 : 16;
    p.tiles = int32_t((rows + each - 1) / each);
    p.steps = int32_t((a.k + F::KSTEP - 1) / F::KSTEP);
    p.phase_steps = PHASE_VALUES / F::KSTEP;
    p.phases = (p.steps + p.phase_steps - 1) / p.phase_steps;
    p.waves_shift = waves_shift<F>(p, limits.processors * BLOCKS_LAUNCHED);
    p.tile_hop = blocks * (WAVES >> p.waves_shift), p.row_hop = int32_t(p.tile_hop * each);
    p.weight_hop = F::TILED ? int64_t(p.tile_hop) * p.steps * F::STEP_BYTES : p.row_hop * (a.k * F::VALUE_BITS / 8);
    p.scale_hop = int64_t(p.tile_hop) * (((p.steps - 1) >> a.group_shift) + 1) * 8 * SCALE_BYTES<F>;
    p.w_aligned = F::TILED || multiple_of_16(a.w, a.k * F::VALUE_BITS / 8);
    p.x_aligned = multiple_of_16(a.x, a.x_stride * 2) && a.k % 8 == 0 && multiple_of_16(a.norm_weight) && multiple_of_16(a.norm_bias);
    const int64_t half = limits.shared_processor / 2 - RESERVED_SHARED, whole = limits.shared_block;
    for (const bool all : {true, false}) {  // what is staged in phases is staged anew for every tile
        for (const int64_t room : {half, whole}) {
            if (!all && (p.phases == 1 || a.norm)) continue;
            p.resident = all ? p.phases : 1;
            for (const int depth : {DEEP, SHALLOW}) {
                if (depth == DEEP && DEEP != SHALLOW && a.shallow) continue;
                const int64_t bytes = lay_out<F, T>(p, a, narrow, depth);
                p.bytes = int32_t(bytes);
                if (bytes <= room) return depth;
            }
        }
    }
    return 0;
}

template <class F, class T, bool NARROW> auto kernel_of(int depth) { return depth == DEEP ? gemv_kernel<F, T, NARROW, DEEP> : gemv_kernel<F, T, NARROW, SHALLOW>; }

template <class F, class T> int launch(const GemvArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    const bool narrow = F::INTEGER && a.m <= NARROW_TOKENS;
    const int blocks = a.blocks > 0 ? a.blocks : limits.processors * BLOCKS_LAUNCHED;
    GemvPlan plan = {};
    const int depth = make_plan<F, T>(plan, a, limits, blocks, narrow);
    if (!depth) return STATUS_MEMORY;
    auto kernel = kernel_of<F, T, false>(depth);
    if constexpr (F::INTEGER && NARROW_TOKENS > 0) {
        if (narrow) kernel = kernel_of<F, T, true>(depth);
    }
    const int error = launch_kernel(kernel, blocks, THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

// More than 8 tokens: the same launch for each 8 of them.
template <class F, class T> int launch_all(const GemvArgs& args, GpuStream stream) {
    GemvArgs a = args;
    a.m = args.m < 8 ? args.m : 8;
    if (const int bad = check(a)) return bad;
    int64_t most = 8;  // fewer where a norm over a very long K leaves no room: a row's bits stay the same
    for (int64_t done = 0; done < args.m; done += a.m) {
        a.m = args.m - done < most ? args.m - done : most;
        a.x = static_cast<const uint16_t*>(args.x) + done * args.x_stride;
        a.y = static_cast<uint16_t*>(args.y) + done * args.y_stride;
        if (args.residual) a.residual = static_cast<const uint16_t*>(args.residual) + done * args.residual_stride;
        const int bad = launch<F, T>(a, stream);
        if (bad == STATUS_MEMORY && most > 1) most /= 2, a.m = 0;
        else if (bad) return bad;
    }
    return STATUS_OK;
}
