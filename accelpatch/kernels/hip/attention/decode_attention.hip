// decode_attention: fp16 and bf16, heads of 8 to 256 columns (AMD: 128). dtype: 0 bf16, 1 fp16.
#include "attention_launch.h"
#include "instances.h"

namespace {
int check(const AttentionArgs& a) {
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
    return a.positions && a.slot && a.mask && (a.inv_freq || !a.rotary_dim) && a.finished ? STATUS_OK : STATUS_POINTER;
}

template <class T, int WIDE> int launch(const AttentionArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    const auto stage_buffer = [](int64_t depth) { return SHARED_STAGES ? depth * WARPS * (TILE * WIDE * 2) : 0; };
    for (const int buffers : {2, 1}) {
        for (const bool deep : {true, false}) {
            const int64_t least = stage_buffer(2), wanted = deep ? ATTENTION_DEEP : ATTENTION_SHALLOW;
            AttentionPlan plan = lay_out<WIDE>(a, wanted > least ? wanted : least, buffers);
            if (!reserve_levels<WIDE>(plan, half_of(limits), buffers == 1 && !deep ? limits.shared_block : 0)) continue;
            if constexpr (KINDS_HERE<WIDE>) {
                constexpr int SEVERALS = OF_SEVERAL<WIDE>;
                const Kind kind = kind_of<WIDE>(a);
                if (kind == ONE && (deep || WIDE > 64)) {
                    if (WIDE > 64 && deep && many_splits(a, limits.sms)) continue;
                    return start_of_one(a, plan, limits, T::BF16 ? 0 : 1, deep, stream);
                }
                if (kind == SEVERAL && deep == (SEVERALS == ATTENTION_DEEP))
                    return start_of_rows<T, WIDE, SEVERALS, SEVERAL>(a, plan, limits, stream);
                if (kind == LONE_TOKENS && !deep)
                    return start<T, WIDE, ATTENTION_SHALLOW, LONE_TOKENS>(a, plan, limits, stream);
            }
            return deep ? start<T, WIDE, ATTENTION_DEEP>(a, plan, limits, stream)
                        : start<T, WIDE, ATTENTION_SHALLOW>(a, plan, limits, stream);
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
}  // namespace

extern "C" int accelpatch_decode_attention(const AttentionArgs* args, int dtype, void* stream) {
    if (const int bad = check(*args)) return bad;
    AttentionArgs a = *args;
    const auto s = static_cast<GpuStream>(stream);
    if (a.consumer && (a.tokens > 1 || a.rows > 8 || !device_limits().dependent_launch)) {
        // Two tokens of a row, of which one sees the other: signalled, but not waited for.
        if (a.tokens * a.rows <= 8 && device_limits().dependent_launch) clear(a.consumer, s);
        a.consumer = nullptr;
    }
    return by_dtype(dtype, [&](auto t) { return by_size<decltype(t)>(a, s); });
}
