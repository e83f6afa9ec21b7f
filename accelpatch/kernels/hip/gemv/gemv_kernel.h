// The kernel of gemv, gemv_int8, gemv_int4, gemv_fp8, gemv_w8a8 and gemv_w8a8_fp8.
//
// A block's eight warps compute one or two tiles of 16 rows at a time. The warps of a tile take its stages along K in
// turn, and reduce their sums through shared memory in a fixed order. Only the number of columns that are stored
// depends on M, so that the bits of a row's result do not. Weights stream through a multi-stage buffer, half of which
// is prefetched before grid_wait(); activations are staged in shared memory, in K tiles. Where the linear layer before
// signals its finished columns, all K tiles but the last are consumed before that kernel has ended. This hides the time
// of its last tiles, the wait for its end and the staging.
#pragma once
#include "gemv_output.h"

// Waits until the activations may be read: for the end of the kernel before, or for its signal that the first columns
// are finished. Precondition: all threads of the block call it, once their addresses are computed. A signal that this
// launch does not use is reset.
DEVICE void wait_grid_or_signal(const GemvArgs& a, const GemvPlan& plan) {
    if (!plan.signalled_k_tiles) {
        grid_wait();
        if (a.consumer && blockIdx.x == 0 && threadIdx.x == 0) a.consumer[0] = 0;
    } else {
        if (threadIdx.x == 0) signal_wait(a.consumer, int(a.consumer_columns), a.m > 1);
        __syncthreads();
    }
}
// Resets the signal of the kernel before, in the last block that calls it. Precondition: the block has waited for the
// end of that kernel. One thread counts the block, while the other warps go on, since it takes half a microsecond.
DEVICE void reset_signal(const GemvArgs& a) {
    if (threadIdx.x == THREADS - 1 && last_call(a.consumer + 1, int(gridDim.x))) a.consumer[0] = 0;
}

// Sets the sums to zero, and for STAGE_SCALES the tile whose scales they use.
template <class F, class SUMS> DEVICE void start_sums(SUMS& total, const GemvArgs& a, int tile) {
    total.zero();
    if constexpr (STAGE_SCALES<F> && !HALVES<F>) total.set_tile(a, tile);
}

// Multiplies a warp's stages from step `from` to `end`. Precondition: activations are staged from step `begin` on, and
// a barrier has made them visible.
template <bool BF16_SCALES, class F, int DEPTH, class SUMS>
DEVICE void sweep(
    Stream<F, DEPTH>& stream, SUMS& total, const typename SUMS::Place& place, int from, int end, int begin) {
    if constexpr (STAGE_SCALES<F> && !HALVES<F>) total.staged_from = begin;
#pragma unroll 1
    for (int step = from; step < end; step += stream.stride) {
        Slot<F> now[PAIR<F>];
        stream.consume(now);
        total.template multiply_stage<BF16_SCALES>(now, place, step - begin);
    }
}

#if defined(LOW_RANK)
// The same with adapters. last: whether it is the last K tile of the warp's tile. Of the warp's first tile this K tile
// is swept in two halves, between which the warp collects its part of the adapters' sums while weights are being
// loaded.
template <class F, int DEPTH, class SUMS, class LOW>
DEVICE void sweep_halves(const GemvArgs& a, Stream<F, DEPTH>& stream, SUMS& total, const typename SUMS::Place& place,
    int from, int end, int begin, LOW& adapters, bool last) {
    const bool collects = last && !adapters.collected();
    const int half = from + max(end - from, 0) / (2 * stream.stride) * stream.stride;
#pragma unroll 1
    for (int part = collects ? 0 : 1; part < 2; ++part) {
        const int at = collects && part ? half : from, until = part ? end : half;
        if (F::GROUPS && a.scale_is_bf16) sweep<true>(stream, total, place, at, until, begin);
        else sweep<false>(stream, total, place, at, until, begin);
        if (part == 0) adapters.collect();
    }
}
#endif

// Signals the columns of all rounds up to this one, the last one that has columns to signal. Precondition: the warps
// that store the tile call it after their stores. name, threads: the barrier that these warps share. It, or a warp
// barrier where one warp stores, orders the stores before the signal.
template <bool NARROW> DEVICE void signal_round(const GemvArgs& a, int wk, int name, int threads, int round) {
    if (NARROW || a.m <= NARROW_TOKENS) warp_sync();
    else group_sync(name, threads);  // other warps have stored the tokens from the third on
    if ((NARROW || wk == 0) && lane_id() == 0) {
        const int columns = (round + 1) * (a.activation == ACT_SILU_GATE ? 8 : 16);
        if (a.m == 1) signal_add<false>(a.producer, columns);
        else signal_add<true>(a.producer, columns);
    }
}

// Stages activations for `steps` steps from step k_tile_begin on, after those that were staged from step `begin` on.
// The first time (not begun) it waits for the kernel before, and prefetches the rest of the stream's stages.
// Precondition: every thread of the block calls it. It ends with a barrier (Stager::range).
template <class STAGER, class FLOW>
DEVICE void stage_next(const GemvArgs& a, const GemvPlan& plan, STAGER& stager, FLOW& stream, int k_tile_begin,
    int steps, int begin, bool& begun) {
    const auto wait = [&]() ALWAYS_INLINE {
        if (!begun) wait_grid_or_signal(a, plan) ADAPTERS(, begin_low(a, low_here(plan, stager.shared)));
    };
    stager.range(
        k_tile_begin, steps, k_tile_begin - begin, wait, [&]() ALWAYS_INLINE { return begun ? 0 : stream.fill(); });
    begun = true;
}

// The scale of a quantised token, for the epilogue.
template <class F, class STAGER> DEVICE float token_scale(const STAGER& stager, int token) {
    if constexpr (QUANTIZES_ROWS<F>) return stager.scales()[token];
    else return 1.f;
}

// NARROW: up to NARROW_TOKENS tokens. DEPTH: stages of the multi-stage buffer. WK warps share a tile, and WN tiles are
// computed at once.
//
// One of a tile's warps, another one each round, reduces the tile's partial sums, while the others go on. A warp waits
// for the others once in WK rounds, so that of WK buffers of partial sums the next is free when it is needed. With many
// tokens all warps of the tile reduce.
template <class F, class T, bool NARROW, int DEPTH>
DEVICE void multiply_block(const GemvArgs& a, const GemvPlan& plan, char* shared) {
    using Sums = SumsFor<F, T, NARROW>;
    const int WK = 1 << plan.warps_shift, WN = WARPS >> plan.warps_shift;
    const int warp = threadIdx.x / WARP_SIZE, wk = warp & (WK - 1), wn = warp >> plan.warps_shift;
    Stream<F, DEPTH> stream(a, plan, wk, tile_of<F>(plan, 0, wn),
        shared + plan.stages_at + warp * DEPTH * STREAM_STAGE_BYTES<F> + lane_id() * 16);
    constexpr bool COMMON = DEPTH > SHALLOW;
    using Stager = typename Sums::template Stager<COMMON>;
    Stager stager(a, plan, shared);
    const auto adds = [&](int round) { return NARROW ? wk == (round & (WK - 1)) : true; };
    const int seat = NARROW ? lane_id() : threadIdx.x & (WK * WARP_SIZE - 1);
    Output<F, T> output(a, plan, adds(0) ? tile_of<F>(plan, 0, wn) : plan.tiles, seat);
    const typename Sums::Place place(a, plan, shared);
    ADAPTERS(Adapters<T, NARROW> adapters(a, plan, low_here(plan, shared), wk, WK, tile_of<F>(plan, 0, wn));)
    const bool fully_staged = plan.staged_k_tiles == plan.k_tiles;
    int there = 0;  // K tiles before this one are staged; 0: K has to be staged again
    bool begun = false;
    int tile = tile_of<F>(plan, 0, wn);
    for (int round = 0; tile - wn * tile_blocks<F>(plan) < plan.tiles; ++round, tile += plan.tile_hop) {
        const bool adder = adds(round);
        if (adder && round > 0) output = Output<F, T>(a, plan, tile, seat);
        Sums total;
        start_sums<F>(total, a, tile);
        for (int k_tile = 0; k_tile < plan.k_tiles;) {
            const int k_tile_begin = k_tile * plan.k_tile_steps, begin = fully_staged ? 0 : k_tile_begin;
            if (k_tile >= there) {
                const bool rest = begun && fully_staged;
                if (rest) grid_wait();
                else if (begun) __syncthreads();
                there = !fully_staged                     ? k_tile + 1
                        : k_tile < plan.signalled_k_tiles ? plan.signalled_k_tiles
                                                          : plan.k_tiles;
                stage_next(a, plan, stager, stream, k_tile_begin,
                    min(plan.steps, there * plan.k_tile_steps) - k_tile_begin, begin, begun);
                ADAPTERS(adapters.multiply(static_cast<const Norms<T, false, COMMON>&>(stager));)
                if (rest) reset_signal(a);
            }
            if (adder && k_tile == 0) output.load_residual(a);
            const int from = k_tile_begin + stream.first, end = min(plan.steps, there * plan.k_tile_steps);
            k_tile = there;
            if (!fully_staged) there = 0;
            if (tile >= plan.tiles) continue;
            ADAPTERS(sweep_halves(a, stream, total, place, from, end, begin, adapters, k_tile == plan.k_tiles);
                continue;)
            if (F::GROUPS && a.scale_is_bf16) sweep<true>(stream, total, place, from, end, begin);
            else sweep<false>(stream, total, place, from, end, begin);
        }
        total.finish();
        const int buffer = round & (plan.partial_buffers - 1);
        auto* partial = reinterpret_cast<typename Sums::Value*>(shared + plan.partial_at) +
                        (buffer * WN + wn) * int(a.m) * WK * PARTIAL_STRIDE;
#pragma unroll
        for (int i = 0; i < Sums::COUNT; ++i)
            if (Sums::owns(i) && Sums::token(i) < int(a.m))
                partial[(Sums::token(i) * WK + wk) * PARTIAL_STRIDE + Sums::row(i)] = total.sum[i];
        const int name = NARROW ? wn * WK + buffer : wn;
        if (!adder) {
            group_arrive(name, WK * WARP_SIZE);
            continue;
        }
        group_sync(name, WK * WARP_SIZE);
        ADAPTERS(output.add_adapters(a, adapters.here, seat);)
        if (output.column >= 0) {
            typename Sums::Value first = 0, second = 0;
            const auto* mine = partial + (seat >> 4) * WK * PARTIAL_STRIDE + (seat & 15);
            const bool gate = a.activation == ACT_SILU_GATE;
#pragma unroll
            for (int w = 0; w < 4; ++w) first += mine[w * PARTIAL_STRIDE];
            if (gate)
#pragma unroll
                for (int w = 0; w < 4; ++w) second += mine[w * PARTIAL_STRIDE + 8];
            if (WK > 4) {
#pragma unroll
                for (int w = 4; w < WARPS; ++w) first += mine[w * PARTIAL_STRIDE];
                if (gate)
#pragma unroll
                    for (int w = 4; w < WARPS; ++w) second += mine[w * PARTIAL_STRIDE + 8];
            }
            if constexpr (COMPACT<F>) add_outliers(a, plan, stager, shared, tile, seat, gate, output, first, second);
            if constexpr (Stager::BOUNDED) {
                // NaN comes from an activation or a weight that is not finite.
                if (RARELY(first != first || second != second)) {
#pragma unroll 1
                    for (int r = seat & 15, i = 0; r < 16; r += 8, ++i) {
                        float made;
                        if constexpr (STACKED<F>) made = stacked_sum<F>(a, plan, stager, tile, r);
                        else made = unbounded_sum<F>(a, plan, stager, tile, r, seat >> 4, i ? second : first);
                        if (i) second = made;
                        else first = made;
                    }
                }
            }
            output.template store<COMMON>(a, first, second, token_scale<F>(stager, seat >> 4));
        }
        if (tile < plan.signalled && tile + plan.tile_hop >= plan.signalled)
            signal_round<NARROW>(a, wk, name, WK * WARP_SIZE, round);
        if (!NARROW && plan.partial_buffers == 1) group_sync(name, WK * WARP_SIZE);
    }
    if (!begun) grid_wait() ADAPTERS(, begin_low(a, adapters.here));  // no tile
    if (plan.signalled_k_tiles && there < plan.k_tiles) reset_signal(a);
}

template <class F, class T, bool NARROW, int DEPTH>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT) gemv_kernel(const GemvArgs a, const GemvPlan plan) {
    extern __shared__ __align__(128) char shared[];
    grid_release();
    multiply_block<F, T, NARROW, DEPTH>(a, plan, shared);
}
