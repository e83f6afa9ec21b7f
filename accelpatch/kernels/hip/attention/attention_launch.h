// Host side of decode attention: where things lie in shared memory, how many blocks, the launch.
#pragma once
#include "attention_kernel.h"
#include "instances.h"

template <int WIDE> AttentionPlan lay_out(const AttentionArgs& a, int64_t stage_buffer, int buffers) {
    AttentionPlan p = {};
    SharedLayout layout;
    const int64_t all = a.tokens * (a.heads / a.kv_heads), row = WIDE * 2 + 16;
    p.group = int32_t(a.heads / a.kv_heads);
    p.tiles = int32_t((all + QUERIES - 1) / QUERIES), p.queries = int32_t(all < QUERIES ? all : QUERIES),
    p.buffers = buffers;
    p.starts_at = layout.reserve((2 * a.rows + (BLOCKS_MEET ? 1 : 0)) * 4);
    p.angles_at = layout.reserve(a.tokens * a.rotary_dim * 4);
    p.queries_at = layout.reserve(p.queries * row), p.fresh_at = layout.reserve(a.tokens * 2 * row);
    p.tops_at = layout.reserve(int64_t(buffers) * p.queries * TOPS * 4),
    p.states_at = layout.reserve(int64_t(buffers) * p.queries * QUERY_STRIDE<WIDE> * 4);
    p.stages_at = layout.reserve(stage_buffer), p.bytes = p.level_sums_at = int32_t(layout.bytes);
    return p;
}

// Reserves shared memory for as many levels of the reduction tree over KV splits as fit. Where all else fits half an
// SM, the levels must too, so that a block of the next linear layer fits the same SM; else for the levels of one
// subtree, which leaves the rest to a small kernel.
template <int WIDE> bool reserve_levels(AttentionPlan& p, int64_t half, int64_t most) {
    const bool fits = p.bytes <= half;
    const int64_t each = p.queries * LEVEL_FLOATS<WIDE> * 4, room = fits ? half : most,
                  levels = fits ? LEVELS : FAN_IN_LEVELS;
    if (p.bytes > room) return false;
    p.levels = int32_t((room - p.bytes) / each < levels ? (room - p.bytes) / each : levels);
    p.bytes += int32_t(p.levels * each);
    return true;
}

// KV splits of all heads where the cache is full.
inline int64_t splits_of(const AttentionArgs& a, int64_t heads) { return heads * ((a.capacity - 1) / KV_SPLIT + 1); }

// Two blocks share an SM, one of which reads while the other waits: where there are heads for nearly all of them, or
// where heads are divided in any case and a full cache has more KV splits than there are SMs. Not where a linear
// layer of few rows follows: with one block of attention an SM each SM has room for one of its blocks; with two some
// SMs would get two of them, and others none.
template <int WIDE> int blocks_of(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits) {
    const int64_t heads = a.rows * a.kv_heads * plan.tiles;
    const int sms = limits.sms;
    const bool alone = WIDE > 128 || plan.bytes > half_sm_bytes(limits);
    if (alone || (a.following && a.rows * a.tokens <= QUERIES)) return sms;
    const bool filled = 8 * heads >= 7 * BLOCKS_RESIDENT * sms,
               divided = 4 * heads >= sms && 2 * heads <= sms && splits_of(a, heads) > sms;
    return filled || divided ? BLOCKS_RESIDENT * sms : sms;
}

// Whether SMs have so many KV splits that the shallow multi-stage buffer is better (one block each; two are as fast
// with either): the more is under way, the less evenly memory serves them, and all have the same to read. The deep one
// has more of a short cache when the kernel before ends. Codes of 8 bits are read in fewer bytes at a time, and the
// deep one is faster for long caches of them too.
inline bool many_splits(const AttentionArgs& a, int sms) {
    return !a.key_scales && splits_of(a, a.rows * a.kv_heads) >= 8 * sms;
}

template <class T, int WIDE, int BUFFER_BYTES, Kind KIND = ANY>
int start(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, GpuStream stream) {
    const int error = launch_kernel(attention_kernel<T, WIDE, BUFFER_BYTES, KIND>, blocks_of<WIDE>(a, plan, limits),
        THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

template <class T, int WIDE, int BUFFER_BYTES, Kind KIND>
int start_of_rows(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, GpuStream stream) {
    if (a.rows == 1) return start<T, WIDE, BUFFER_BYTES, lone(KIND)>(a, plan, limits, stream);
    if constexpr (WIDE > 64) {
        const int64_t heads = a.rows * a.kv_heads, blocks = blocks_of<WIDE>(a, plan, limits);
        if (heads <= blocks && splits_of(a, heads) >= LEAST_DYNAMIC * blocks)
            return start<T, WIDE, BUFFER_BYTES, dynamic(KIND)>(a, plan, limits, stream);
    }
    return start<T, WIDE, BUFFER_BYTES, KIND>(a, plan, limits, stream);
}

// Whether heads of WIDE columns have kernels of their own kinds, and the buffer of those for SEVERAL: what fits.
// Bytes of the multi-stage buffers: of codes as many stages as of numbers, and more, in fewer bytes.
template <class T> constexpr int DEEP_BUFFER = CODED<T> ? ATTENTION_SHALLOW : ATTENTION_DEEP;
template <class T> constexpr int SHALLOW_BUFFER = CODED<T> ? ATTENTION_SHALLOW / 4 * 3 : ATTENTION_SHALLOW;
template <class T, int WIDE> constexpr bool KINDS_HERE = DEEP_BUFFER<T> > SHALLOW_BUFFER<T>&& WIDE <= 128;
template <class T, int WIDE> constexpr int OF_SEVERAL = WIDE > 64 ? SHALLOW_BUFFER<T> : DEEP_BUFFER<T>;

// Launches of kind ONE by their buffer.
template <class T, int WIDE>
int one_by_buffer(
    const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, bool deep, GpuStream s) {
    if constexpr (KINDS_HERE<T, WIDE> && HAS<WIDE>) {
        if (deep) return start_of_rows<T, WIDE, DEEP_BUFFER<T>, ONE>(a, plan, limits, s);
        if constexpr (WIDE > 64) return start_of_rows<T, WIDE, SHALLOW_BUFFER<T>, ONE>(a, plan, limits, s);
    }
    return STATUS_FORMAT;
}

// The launch of kind ONE over a cache that is not quantised. Its kernels are half of all, so that they have a source of
// their own, which is compiled at the same time as the rest.
int start_of_one(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, int dtype, bool deep,
    GpuStream stream);
