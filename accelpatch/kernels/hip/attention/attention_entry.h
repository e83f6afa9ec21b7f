// Which kernel a launch of decode attention takes, and whether its arguments are right: heads of 8 to 256 columns (AMD:
// 128); over a cache of codes a multiple of 16.
#pragma once
#include "attention_launch.h"
#include "instances.h"

namespace {
int check(const AttentionArgs& a, bool codes) {
    if (a.rows < 1 || a.rows > MOST_ROWS || a.tokens < 1 || a.tokens > 8 || a.kv_heads < 1 || a.heads < 1 ||
        a.heads % a.kv_heads)
        return STATUS_SIZE;
    if (a.size < 8 || a.size > ATTENTION_WIDEST || a.size % 8 || a.rotary_dim < 0 || a.rotary_dim > a.size ||
        a.rotary_dim % 2 || a.window < 0 || a.window >= LARGEST)
        return STATUS_SIZE;
    if (a.heads >= LARGEST / 1024 || a.capacity < 1 || a.capacity >= LARGEST / 1024 ||
        a.splits < (a.capacity - 1) / KV_SPLIT + 2)
        return STATUS_SIZE;
    if (a.rows * a.heads * a.tokens * a.splits >= LARGEST) return STATUS_SIZE;
    const void* const aligned[] = {a.qkv, a.keys, a.values, a.y, a.partials};
    for (const void* p : aligned)
        if (!p || !multiple_of_16(p)) return STATUS_POINTER;
    if (!multiple_of_16(a.following)) return STATUS_POINTER;
    if (codes && (a.size % 16 || !a.key_scales || !a.value_scales)) return a.size % 16 ? STATUS_SIZE : STATUS_POINTER;
    return a.positions && a.slot && a.mask && (a.inv_freq || !a.rotary_dim) && a.finished ? STATUS_OK : STATUS_POINTER;
}

template <class T, int WIDE> int launch(const AttentionArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    const auto stage_buffer = [](int64_t depth) {
        return SHARED_STAGES ? depth * WARPS * (TILE * WIDE * CACHE_BYTES<T>) : 0;
    };
    for (const int buffers : {2, 1}) {
        for (const bool deep : {true, false}) {
            const int64_t least = stage_buffer(2), wanted = deep ? DEEP_BUFFER<T> : SHALLOW_BUFFER<T>;
            AttentionPlan plan = lay_out<WIDE>(a, wanted > least ? wanted : least, buffers);
            if (!reserve_levels<WIDE>(plan, half_sm_bytes(limits), buffers == 1 && !deep ? limits.shared_block : 0))
                continue;
            if constexpr (KINDS_HERE<T, WIDE>) {
                constexpr int SEVERALS = OF_SEVERAL<T, WIDE>;
                const Kind kind = kind_of<WIDE>(a);
                if (kind == ONE && (deep || WIDE > 64)) {
                    if (WIDE > 64 && deep && many_splits(a, limits.sms)) continue;
                    if constexpr (CODED<T>) return one_by_buffer<T, WIDE>(a, plan, limits, deep, stream);
                    else return start_of_one(a, plan, limits, T::BF16 ? 0 : 1, deep, stream);
                }
                if (kind == SEVERAL && deep == (SEVERALS == DEEP_BUFFER<T>))
                    return start_of_rows<T, WIDE, SEVERALS, SEVERAL>(a, plan, limits, stream);
                if (kind == LONE_TOKENS && !deep)
                    return start<T, WIDE, SHALLOW_BUFFER<T>, LONE_TOKENS>(a, plan, limits, stream);
            }
            return deep ? start<T, WIDE, DEEP_BUFFER<T>>(a, plan, limits, stream)
                        : start<T, WIDE, SHALLOW_BUFFER<T>>(a, plan, limits, stream);
        }
    }
    return STATUS_MEMORY;
}

template <class T> int by_size(const AttentionArgs& a, GpuStream stream) {
    if constexpr (ATTENTION_WIDEST > 128 && HAS<256>) {
        if (a.size > 128) return launch<T, 256>(a, stream);
    }
    if constexpr (HAS<128>) {
        if (a.size > 64 && a.size <= 128) return launch<T, 128>(a, stream);
    }
    if constexpr (HAS<64>) {
        if (a.size <= 64) return launch<T, 64>(a, stream);
    }
    return STATUS_FORMAT;
}

// A launch from its arguments. by_type: calls its argument with a dtype of activations, and of their cache.
template <class BY_TYPE> int decode_attention(const AttentionArgs& args, bool codes, void* stream, BY_TYPE by_type) {
    if (const int bad = check(args, codes)) return bad;
    AttentionArgs a = args;
    const auto s = static_cast<GpuStream>(stream);
    if (a.consumer && (a.tokens > 1 || a.rows > 8 || !device_limits().dependent_launch)) {
        // Two tokens of a row, of which one sees the other: signalled, but not waited for.
        if (a.tokens * a.rows <= 8 && device_limits().dependent_launch) clear(a.consumer, s);
        a.consumer = nullptr;
    }
    return by_type([&](auto t) { return by_size<decltype(t)>(a, s); });
}
}  // namespace
