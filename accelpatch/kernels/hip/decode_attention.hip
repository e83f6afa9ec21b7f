// decode_attention: fp16 and bf16, heads of 8 to 256 columns (AMD: 128). dtype: 0 bf16, 1 fp16.
#include "attention_kernel.h"
#include "host.h"

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

template <int WIDE> AttentionPlan lay_out(const AttentionArgs& a, int64_t stage_buffer, int buffers) {
    AttentionPlan p = {};
    SharedLayout layout;
    const int64_t all = a.tokens * (a.heads / a.kv_heads), row = WIDE * 2 + 16;
    p.group = int32_t(a.heads / a.kv_heads);
    p.tiles = int32_t((all + QUERIES - 1) / QUERIES), p.queries = int32_t(all < QUERIES ? all : QUERIES),
    p.buffers = buffers;
    p.starts_at = layout.reserve((a.rows + (BLOCKS_MEET ? 1 : 0)) * 4);
    p.angles_at = layout.reserve(a.tokens * a.rotary_dim * 4);
    p.queries_at = layout.reserve(p.queries * row), p.fresh_at = layout.reserve(a.tokens * 2 * row);
    p.tops_at = layout.reserve(int64_t(buffers) * p.queries * TOPS * 4),
    p.states_at = layout.reserve(int64_t(buffers) * p.queries * QUERY_STRIDE<WIDE> * 4);
    p.stages_at = layout.reserve(stage_buffer), p.bytes = p.level_sums_at = int32_t(layout.bytes);
    return p;
}

// As many levels of the KV splits' tree as fit: into half an SM, where all else fits there, so that a product finds
// room beside it; else a subtree's, which leave a small product what room there is.
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
// where heads are divided in any case and a full cache has more KV splits than there are SMs. Not where a product of
// few rows follows: behind one block it finds a place on each SM, behind two on some two and on others none.
template <int WIDE> int blocks_of(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits) {
    const int64_t heads = a.rows * a.kv_heads * plan.tiles;
    const int sms = limits.sms;
    const bool alone = WIDE > 128 || plan.bytes > half_of(limits);
    if (alone || (a.following && a.rows * a.tokens <= QUERIES)) return sms;
    const bool filled = 8 * heads >= 7 * BLOCKS_RESIDENT * sms,
               divided = 4 * heads >= sms && 2 * heads <= sms && splits_of(a, heads) > sms;
    return filled || divided ? BLOCKS_RESIDENT * sms : sms;
}

// Whether SMs have so many KV splits that the shallow multi-stage buffer is better (one block each; two are as fast
// with either): the more is under way, the less evenly memory serves them, and all have the same to read. The deep one
// has more of a short cache when the kernel before ends.
inline bool many_splits(const AttentionArgs& a, int sms) { return splits_of(a, a.rows * a.kv_heads) >= 8 * sms; }

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

template <class T, int WIDE> int launch(const AttentionArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    const auto stage_buffer = [](int64_t depth) { return SHARED_STAGES ? depth * WARPS * (TILE * WIDE * 2) : 0; };
    for (const int buffers : {2, 1}) {
        for (const bool deep : {true, false}) {
            const int64_t least = stage_buffer(2), wanted = deep ? ATTENTION_DEEP : ATTENTION_SHALLOW;
            AttentionPlan plan = lay_out<WIDE>(a, wanted > least ? wanted : least, buffers);
            if (!reserve_levels<WIDE>(plan, half_of(limits), buffers == 1 && !deep ? limits.shared_block : 0)) continue;
            if constexpr (ATTENTION_DEEP > ATTENTION_SHALLOW && WIDE <= 128) {
                constexpr int OF_SEVERAL = WIDE > 64 ? ATTENTION_SHALLOW : ATTENTION_DEEP;  // what fits
                const Kind kind = kind_of<WIDE>(a);
                if (kind == ONE && deep) {
                    if (WIDE > 64 && many_splits(a, limits.sms)) continue;
                    return start_of_rows<T, WIDE, ATTENTION_DEEP, ONE>(a, plan, limits, stream);
                }
                if constexpr (WIDE > 64)
                    if (kind == ONE) return start_of_rows<T, WIDE, ATTENTION_SHALLOW, ONE>(a, plan, limits, stream);
                if (kind == SEVERAL && deep == (OF_SEVERAL == ATTENTION_DEEP))
                    return start_of_rows<T, WIDE, OF_SEVERAL, SEVERAL>(a, plan, limits, stream);
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
    if constexpr (ATTENTION_WIDEST > 128) {
        if (a.size > 128) return launch<T, 256>(a, stream);
    }
    return a.size <= 64 ? launch<T, 64>(a, stream) : launch<T, 128>(a, stream);
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
    return dtype ? by_size<F16>(a, s) : by_size<Bf16>(a, s);
}
