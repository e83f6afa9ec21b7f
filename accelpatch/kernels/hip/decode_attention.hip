// decode_attention: fp16 and bf16, heads of 8 to 256 columns (AMD: 128). dtype: 0 bf16, 1 fp16.
#include "attention_kernel.h"
#include "host.h"

namespace {
int check(const AttentionArgs& a) {
    if (a.rows < 1 || a.rows > MOST_ROWS || a.tokens < 1 || a.tokens > 8 || a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads) return STATUS_SIZE;
    if (a.size < 8 || a.size > ATTENTION_WIDEST || a.size % 8 || a.turned < 0 || a.turned > a.size || a.turned % 2 || a.window < 0 || a.window >= LARGEST) return STATUS_SIZE;
    if (a.heads >= LARGEST / 1024 || a.capacity < 1 || a.capacity >= LARGEST / 1024 || a.spans < (a.capacity - 1) / SPAN + 2) return STATUS_SIZE;
    if (a.rows * a.heads * a.tokens * a.spans >= LARGEST) return STATUS_SIZE;
    const void* const aligned[] = {a.qkv, a.keys, a.values, a.y, a.records};
    for (const void* p : aligned)
        if (!p || !multiple_of_16(p)) return STATUS_POINTER;
    if (!multiple_of_16(a.following)) return STATUS_POINTER;
    return a.positions && a.slot && a.mask && (a.inv_freq || !a.turned) && a.finished ? STATUS_OK : STATUS_POINTER;
}

template <int WIDE> AttentionPlan lay_out(const AttentionArgs& a, int64_t ring, int buffers) {
    AttentionPlan p = {};
    SharedLayout layout;
    const int64_t all = a.tokens * (a.heads / a.kv_heads), row = WIDE * 2 + 16;
    p.group = int32_t(a.heads / a.kv_heads);
    p.tiles = int32_t((all + QUERIES - 1) / QUERIES), p.queries = int32_t(all < QUERIES ? all : QUERIES), p.buffers = buffers;
    p.starts_at = layout.take((a.rows + (BLOCKS_MEET ? 1 : 0)) * 4);
    p.angles_at = layout.take(a.tokens * a.turned * 4);
    p.queries_at = layout.take(p.queries * row), p.fresh_at = layout.take(a.tokens * 2 * row);
    p.tops_at = layout.take(int64_t(buffers) * p.queries * TOPS * 4), p.states_at = layout.take(int64_t(buffers) * p.queries * QUERY_STRIDE<WIDE> * 4);
    p.ring_at = layout.take(ring), p.bytes = p.nodes_at = int32_t(layout.bytes);
    return p;
}

// As many levels of the spans' tree as fit: into half a processor, where all else fits there, so that a product finds room beside it;
// else a node's, which leave a small product what room there is.
template <int WIDE> bool take_levels(AttentionPlan& p, int64_t half, int64_t most) {
    const bool fits = p.bytes <= half;
    const int64_t each = p.queries * NODE_FLOATS<WIDE> * 4, room = fits ? half : most, levels = fits ? LEVELS : NODE_LEVELS;
    if (p.bytes > room) return false;
    p.levels = int32_t((room - p.bytes) / each < levels ? (room - p.bytes) / each : levels);
    p.bytes += int32_t(p.levels * each);
    return true;
}

// Spans of all heads where the cache is full.
inline int64_t spans_of(const AttentionArgs& a, int64_t heads) { return heads * ((a.capacity - 1) / SPAN + 1); }

// Two blocks share a processor, one of which reads while the other waits: where there are heads for nearly all of them, or where heads are
// divided in any case and a full cache has more spans than there are processors. Not where a product of few rows follows: behind one
// block it finds a place on each processor, behind two on some two and on others none.
template <int WIDE> int blocks_of(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits) {
    const int64_t heads = a.rows * a.kv_heads * plan.tiles;
    const int processors = limits.processors;
    const bool alone = WIDE > 128 || plan.bytes > half_of(limits);
    if (alone || (a.following && a.rows * a.tokens <= QUERIES)) return processors;
    const bool filled = 8 * heads >= 7 * BLOCKS_RESIDENT * processors, divided = 4 * heads >= processors && 2 * heads <= processors && spans_of(a, heads) > processors;
    return filled || divided ? BLOCKS_RESIDENT * processors : processors;
}

// Whether processors have so many spans that the shallow ring is better (one block each; two are as fast with either): the more is under
// way, the less evenly memory serves them, and all have the same to read. The deep one has more of a short cache when the kernel before ends.
inline bool long_shares(const AttentionArgs& a, int processors) { return spans_of(a, a.rows * a.kv_heads) >= 8 * processors; }

template <class T, int WIDE, int RING, Kind KIND = ANY> int start(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, GpuStream stream) {
    const int error = launch_kernel(attention_kernel<T, WIDE, RING, KIND>, blocks_of<WIDE>(a, plan, limits), THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

template <class T, int WIDE, int RING, Kind KIND> int start_of_rows(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, GpuStream stream) {
    if (a.rows == 1) return start<T, WIDE, RING, lone(KIND)>(a, plan, limits, stream);
    if constexpr (WIDE > 64) {
        const int64_t heads = a.rows * a.kv_heads, blocks = blocks_of<WIDE>(a, plan, limits);
        if (heads <= blocks && spans_of(a, heads) >= LEAST_DEALT * blocks) return start<T, WIDE, RING, claiming(KIND)>(a, plan, limits, stream);
    }
    return start<T, WIDE, RING, KIND>(a, plan, limits, stream);
}

template <class T, int WIDE> int launch(const AttentionArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    const auto ring = [](int64_t depth) { return SHARED_RING ? depth * WAVES * (TILE * WIDE * 2) : 0; };
    for (const int buffers : {2, 1}) {
        for (const bool deep : {true, false}) {
            const int64_t least = ring(2), wanted = deep ? ATTENTION_DEEP : ATTENTION_SHALLOW;
            AttentionPlan plan = lay_out<WIDE>(a, wanted > least ? wanted : least, buffers);
            if (!take_levels<WIDE>(plan, half_of(limits), buffers == 1 && !deep ? limits.shared_block : 0)) continue;
            if constexpr (ATTENTION_DEEP > ATTENTION_SHALLOW && WIDE <= 128) {
                constexpr int OF_SEVERAL = WIDE > 64 ? ATTENTION_SHALLOW : ATTENTION_DEEP;  // what fits
                const Kind kind = kind_of<WIDE>(a);
                if (kind == ONE && deep) {
                    if (WIDE > 64 && long_shares(a, limits.processors)) continue;
                    return start_of_rows<T, WIDE, ATTENTION_DEEP, ONE>(a, plan, limits, stream);
                }
                if constexpr (WIDE > 64)
                    if (kind == ONE) return start_of_rows<T, WIDE, ATTENTION_SHALLOW, ONE>(a, plan, limits, stream);
                if (kind == SEVERAL && deep == (OF_SEVERAL == ATTENTION_DEEP)) return start_of_rows<T, WIDE, OF_SEVERAL, SEVERAL>(a, plan, limits, stream);
                if (kind == LONE_TOKENS && !deep) return start<T, WIDE, ATTENTION_SHALLOW, LONE_TOKENS>(a, plan, limits, stream);
            }
            return deep ? start<T, WIDE, ATTENTION_DEEP>(a, plan, limits, stream) : start<T, WIDE, ATTENTION_SHALLOW>(a, plan, limits, stream);
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
