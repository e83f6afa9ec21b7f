// Host side: limits, the plan of shared memory, the launch. Every limit is checked here, in 64-bit arithmetic.
#pragma once
#include "cluster_kernel.h"
#include "arch/host.h"

inline int64_t tile_columns(const GemvArgs& a) { return a.activation == ACT_SILU_GATE ? 8 : 16; }  // of y

inline int check(const GemvArgs& a) {
    if (a.m < 0 || a.m > 8 || a.n < 1 || a.k < 1 || a.n >= LARGEST || a.k >= LARGEST / 16) return STATUS_SIZE;
    if (a.activation == ACT_SILU_GATE && a.n % 2) return STATUS_SIZE;
    if (a.m && (!a.w || !a.x || !a.y)) return STATUS_POINTER;
#if defined(LOW_RANK)
    if (a.rank < 8 || a.rank % 8 || a.ranks < a.rank || a.ranks > 3 * a.rank || a.ranks > MOST_RANKS)
        return STATUS_SIZE;
    if (a.m && (!a.down || !multiple_of_16(a.up) || !multiple_of_16(a.low) || !a.up || !a.low)) return STATUS_POINTER;
#endif
    if (a.producer && (a.producer_columns < 1 || a.producer_columns > (a.activation == ACT_SILU_GATE ? a.n / 2 : a.n) ||
                          a.producer_columns % tile_columns(a)))
        return STATUS_SIZE;
    if (a.consumer && (a.consumer_columns < 1 || a.consumer_columns >= a.k || a.consumer_columns % K_TILE_VALUES))
        return STATUS_SIZE;
    return STATUS_OK;
}

// Whether four or eight warps share a tile: whichever has the busiest warp take fewer stages, a tile's end counted as
// one.
template <class F> int warps_shift(const GemvPlan& p, int blocks) {
    int64_t stages[2];
    for (const int shift : {2, 3}) {
        const int64_t tiles = (p.tiles + blocks - 1) / blocks, at_once = WARPS >> shift,
                      each = (p.steps + PAIR<F> - 1) / PAIR<F>;
        stages[shift - 2] = (tiles + at_once - 1) / at_once * (((each + (1 << shift) - 1) >> shift) + 1);
    }
    return stages[1] < stages[0] ? 3 : 2;
}

// What a kernel with a deep multi-stage buffer, or of clusters, takes; for the rest there is the shallow one. Kernels
// that alternate, a product's and attention's, share the instruction cache: with all that a product may have to do
// inside, a step of int4 took 4 to 8% longer.
inline bool common(const GemvArgs& a, const GemvPlan& p) {
    return p.x_aligned && a.norm != NORM_LAYER && (a.activation == ACT_NONE || a.activation == ACT_SILU_GATE);
}

// The kernel's forms: up to NARROW_TOKENS tokens, more, and more by clusters.
enum class Form { NARROW, WIDE, CLUSTER };

template <class F> constexpr int DEEPEST = F::VALUE_BITS == 16 ? DEEP_FLOATS : COMPACT<F> ? DEEP_COMPACT : DEEP;

// Where everything lies for `staged_k_tiles` K tiles and a multi-stage buffer of `depth`; the bytes in all.
template <class F, class T> int64_t lay_out(GemvPlan& p, const GemvArgs& a, Form form, int depth) {
    const bool clustered = form == Form::CLUSTER;
    const int64_t steps = clustered ? p.k_tile_steps
                                    : round_up(p.staged_k_tiles == p.k_tiles ? p.steps : p.k_tile_steps, PAIR<F>),
                  values = round_up(steps * F::KSTEP, 128);
    const int64_t warps = 1 << p.warps_shift;
    SharedLayout layout;
    int64_t pad = 16, exponents = F::QUANTIZES || HALVES<F> ? values / 128 * 32 : 0;
    if constexpr (!F::QUANTIZES || QUANTIZES_ROWS<F>) pad = F::TOKEN_PAD;
    if constexpr (QUANTIZES_ROWS<F>) exponents = ROW_SCALE_BYTES;
    p.token_stride = int32_t(values * (QUANTIZES_ROWS<F> ? 1 : 2) + pad);
    layout.reserve(p.token_stride * a.m);
    p.block_exponents_at = layout.reserve(exponents);
    p.sums_at = layout.reserve(SUMMED<F> ? steps * F::GROUPS * 32 : 0);
    p.moments_at =
        layout.reserve((clustered ? Norms<T, true, true>::floats(a.norm) : Norms<T, false, false>::floats(a.norm)) * 4);
    // Where memory is short, one buffer and a second barrier.
    p.partial_buffers = int32_t(form == Form::NARROW ? warps : depth >= DEEP ? 2 : 1);
    p.partial_at = layout.reserve(
        clustered ? WARPS * (warps - 1) * DSMEM_SLOT_BYTES : p.partial_buffers * a.m * WARPS * PARTIAL_STRIDE * 4);
    p.parked_at = layout.reserve(clustered && p.rounds_at_once > 1 && p.tiles > p.tile_hop
                                     ? sizeof(SumsFor<F, T, false>) * WARPS * WARP_SIZE
                                     : 0);
    p.experts.routing_at = layout.reserve(STACKED<F> ? sizeof(Routing) : 0);
    const int64_t unused = (MOST_SCORES - round_up(p.experts.experts, 4)) * 4;  // scores
    p.experts.scores_at = layout.reserve(p.experts.logits && !SHARED_STAGES ? sizeof(Scores) - unused : 0);
    p.mbarriers_at = layout.reserve(clustered ? MBARRIERS<F> * 8 : 0);
#if defined(LOW_RANK)
    p.low_at = layout.reserve(LOW_TOKENS * 4 * (a.ranks + THREADS / 32) + 16);
#endif
    p.stages_at = layout.reserve(SHARED_STAGES ? int64_t(depth) * STREAM_STAGE_BYTES<F> * WARPS : 0);
    return layout.bytes;
}

template <class F, class T> int fit(GemvPlan& p, const GemvArgs& a, const DeviceLimits& limits, Form form) {
    for (const bool all : {true, false}) {  // what is staged in K tiles is staged anew for every tile
        for (const int64_t room : {half_sm_bytes(limits), int64_t(limits.shared_block)}) {
            if (!all && (p.k_tiles == 1 || a.norm)) continue;
            p.staged_k_tiles = all ? p.k_tiles : 1;
            for (const int depth : {DEEPEST<F>, DEEP, SHALLOW}) {
                if (depth > DEEPEST<F>) continue;
                if (depth > SHALLOW && (a.shallow || !common(a, p))) continue;
                const int64_t bytes = lay_out<F, T>(p, a, form, depth);
                p.bytes = int32_t(bytes);
                if (bytes <= room) return depth;
            }
        }
    }
    return 0;
}

// In a cluster: the deepest multi-stage buffer that fits, and then as few K tiles of a block's part of K, of which the
// product before may signal.
template <class F, class T> int fit_part(GemvPlan& p, const GemvArgs& a, const DeviceLimits& limits) {
    const int64_t stage = (int64_t(PAIR<F>) << p.warps_shift) / CLUSTER, stages = p.part_steps / stage;
    for (const int64_t room : {half_sm_bytes(limits), int64_t(limits.shared_block)}) {
        for (const int depth : {CLUSTER_DEEP<F>, CLUSTER_DEPTH}) {
            for (int64_t each = stages, k_tiles = 1;; each = (stages + k_tiles - 1) / k_tiles) {
                p.k_tile_steps = int32_t(each * stage);
                p.k_tiles = int32_t((stages + each - 1) / each);
                if (p.k_tiles > 1 && depth > CLUSTER_DEPTH && p.tiles > p.tile_hop)
                    break;  // tiles that wait for each other's K tiles cost more
                p.rounds_at_once = p.k_tiles > 1 ? 2 : 1;
                const int64_t bytes = lay_out<F, T>(p, a, Form::CLUSTER, depth);
                p.bytes = int32_t(bytes);
                if (bytes <= room) return depth;
                if (a.norm || each == 1) break;
                ++k_tiles;
            }
        }
    }
    return 0;
}

// Lays out one launch of up to 8 tokens on so many blocks; the buffer's depth, 0 where even the smallest does not fit.
template <class F, class T>
int make_plan(GemvPlan& p, const GemvArgs& a, const DeviceLimits& limits, int blocks, Form form) {
    const bool gate = a.activation == ACT_SILU_GATE;
    const int64_t rows = gate ? a.n / 2 : a.n, each = gate ? 8 : 16;
    p.tiles = int32_t((rows + each - 1) / each);
    p.steps = int32_t((a.k + F::KSTEP - 1) / F::KSTEP);
    p.k_tile_steps = K_TILE_VALUES / F::KSTEP;
    p.k_tiles = (p.steps + p.k_tile_steps - 1) / p.k_tile_steps;
    p.warps_shift = warps_shift<F>(p, limits.sms * BLOCKS_LAUNCHED);
    const int cluster = form == Form::CLUSTER ? CLUSTER : 1;
    const int64_t shared_stage = PAIR<F> << p.warps_shift;  // of all warps of a tile
    p.part_steps = int32_t((p.steps + shared_stage - 1) / shared_stage * shared_stage / CLUSTER);
    p.tile_hop = blocks / cluster * (WARPS * cluster >> p.warps_shift), p.row_hop = int32_t(p.tile_hop * each);
    p.weight_hop = F::TILED ? int64_t(p.tile_hop) * p.steps * F::STEP_BYTES : p.row_hop * (a.k * F::VALUE_BITS / 8);
    p.scale_hop = F::GROUPS         ? int64_t(p.tile_hop) * (((p.steps - 1) >> a.group_shift) + 1) * 8 * SCALE_BYTES<F>
                  : STAGE_SCALES<F> ? int64_t(p.row_hop) * ((p.steps + PAIR<F> - 1) / PAIR<F>)*4
                                    : 0;
    p.w_aligned = F::TILED || multiple_of_16(a.w, a.k * F::VALUE_BITS / 8);
    p.x_aligned = multiple_of_16(a.x, a.x_stride * 2) && a.k % 8 == 0 && multiple_of_16(a.norm_weight) &&
                  multiple_of_16(a.norm_bias);
    p.y_pairs = rows % 2 == 0 && pairs(a.y, a.y_stride) && (!a.residual || pairs(a.residual, a.residual_stride));
    return form == Form::CLUSTER ? fit_part<F, T>(p, a, limits) : fit<F, T>(p, a, limits, form);
}

template <class F, class T, bool NARROW> auto kernel_of(int depth) {
    if (depth == DEEPEST<F>) return gemv_kernel<F, T, NARROW, DEEPEST<F>>;
    if (DEEP < DEEPEST<F> && depth == DEEP) return gemv_kernel < F, T, NARROW, DEEP < DEEPEST<F> ? DEEP : SHALLOW > ;
    return gemv_kernel<F, T, NARROW, SHALLOW>;
}

template <class F, class T> int launch_as_clusters(const GemvArgs& a, const DeviceLimits& limits, GpuStream stream) {
    const int clusters = a.blocks > 0 ? (a.blocks + CLUSTER - 1) / CLUSTER
                                      : most_clusters(gemv_cluster_kernel<F, T, CLUSTER_DEPTH>, limits);
    if (!clusters) return STATUS_MEMORY;
    GemvPlan plan = {};
    const int depth = make_plan<F, T>(plan, a, limits, clusters * CLUSTER, Form::CLUSTER);
    if (!depth) return STATUS_MEMORY;
    const auto kernel = depth == CLUSTER_DEEP<F> ? gemv_cluster_kernel<F, T, CLUSTER_DEEP<F>>
                                                 : gemv_cluster_kernel<F, T, CLUSTER_DEPTH>;
    if (a.producer) plan.signalled = int32_t(a.producer_columns / tile_columns(a));
    if (a.consumer && !a.norm && a.m > 1 && !QUANTIZES_ROWS<F>)
        plan.signalled_k_tiles = int32_t(a.consumer_columns / (int64_t(plan.k_tile_steps) * CLUSTER * F::KSTEP));
    const int error = launch_clusters(
        kernel, CLUSTER, clusters * CLUSTER, THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

#if defined(LOW_RANK)
// Where blocks do not wait for each other: what adapters add, before the product.
template <class T>
int launch_low_rank(const GemvArgs& a, const GemvPlan& made, const DeviceLimits& limits, GpuStream stream) {
    GemvPlan plan = made;
    SharedLayout layout;
    plan.moments_at = layout.reserve(Norms<T, false, false>::floats(a.norm) * 4);
    plan.low_at = layout.reserve(LOW_TOKENS * (THREADS / 32) * 4);
    const int pieces = a.ranks < 128 ? 128 : a.ranks, blocks = pieces < 2 * limits.sms ? pieces : 2 * limits.sms;
    return launch_kernel(
        low_rank_kernel<T>, blocks, THREADS, int(layout.bytes), stream, limits, a.dependent >= 0, a, plan);
}
#endif

template <class F, class T> int launch(const GemvArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    const bool narrow = F::QUANTIZES && a.m <= NARROW_TOKENS;
    const int blocks = a.blocks > 0 ? a.blocks : limits.sms * BLOCKS_LAUNCHED;
    GemvPlan plan = {};
    const int depth = make_plan<F, T>(plan, a, limits, blocks, narrow ? Form::NARROW : Form::WIDE);
#if !defined(LOW_RANK)
    if constexpr (CLUSTER > 1 && !COMPACT<F>) {
        const bool many = a.m > (F::QUANTIZES ? NARROW_TOKENS : WIDE_TOKENS);
        if (limits.clusters && common(a, plan) && (many || !depth || plan.bytes > half_sm_bytes(limits))) {
            const int status = launch_as_clusters<F, T>(a, limits, stream);
            if (status != STATUS_MEMORY || many) return status;
        }
    }
#endif
    if (!depth) return STATUS_MEMORY;
    if (a.producer) plan.signalled = int32_t(a.producer_columns / tile_columns(a));
#if !defined(LOW_RANK)
    // The scale of a quantised token is known when all of K is.
    if (a.consumer && !a.norm && plan.staged_k_tiles == plan.k_tiles && !QUANTIZES_ROWS<F>)
        plan.signalled_k_tiles = int32_t(a.consumer_columns / K_TILE_VALUES);
#endif
    auto kernel = kernel_of<F, T, false>(depth);
    if constexpr (F::QUANTIZES && NARROW_TOKENS > 0) {
        if (narrow) kernel = kernel_of<F, T, true>(depth);
    }
#if defined(LOW_RANK)
    if constexpr (!BLOCKS_MEET) {
        if (const int error = launch_low_rank<T>(a, plan, limits, stream)) return STATUS_DEVICE + error;
    }
#endif
    const int error = launch_kernel(kernel, blocks, THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

// More than 8 tokens: the same launch for each 8 of them.
template <class F, class T> int launch_all(const GemvArgs& args, GpuStream stream) {
    GemvArgs a = args;
    a.m = args.m < 8 ? args.m : 8;
    if (args.m > 8 || !device_limits().dependent_launch) a.producer = a.consumer = nullptr;
    if (const int bad = check(a)) return bad;
    int64_t most = 8;  // fewer where a norm over a very long K leaves no room: a row's bits stay the same
    for (int64_t done = 0; done < args.m; done += a.m) {
        a.m = args.m - done < most ? args.m - done : most;
        a.x = static_cast<const uint16_t*>(args.x) + done * args.x_stride;
        a.y = static_cast<uint16_t*>(args.y) + done * args.y_stride;
        if (args.residual) a.residual = static_cast<const uint16_t*>(args.residual) + done * args.residual_stride;
        const int bad = launch<F, T>(a, stream);
        if (bad == STATUS_MEMORY && most > 1) {
            if (a.consumer) clear(a.consumer, stream);
            most /= 2, a.m = 0, a.producer = a.consumer = nullptr;
        } else if (bad) return bad;
    }
    return STATUS_OK;
}
