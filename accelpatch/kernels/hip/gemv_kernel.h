// The one kernel behind gemv, gemv_int8, gemv_int4 and gemv_fp8.
//
// A block's eight warps take one or two tiles of 16 rows at a time; the warps of a tile share its K, stage by stage,
// and add up through shared memory in a fixed order. Nothing but the number of columns stored depends on M, so a row's
// bits do not either. Weights stream through a multi-stage buffer, half of which is asked for before grid_wait();
// activations lie in shared memory, in K tiles. Where the product before signals its columns, all K tiles but the last
// are taken up before that one has ended: its last tiles, the wait for its end and the way of activations into shared
// memory then cost less than they take.
#pragma once
#include "mma.h"

constexpr int PARTIAL_STRIDE = 20;  // floats of one token and warp: 16 rows and a pad against bank conflicts

DEVICE int fours(const GemvArgs& a) { return a.group_shift; }  // of outliers, in a row
// The outliers of a tile's row: of each K in the lower half of a word, and the value as bf16; 0xffff where there is
// none. 4 a row or a multiple.
template <class F> DEVICE const Words4* outliers_of(const GemvArgs& a, int tile, int r) {
    return static_cast<const Words4*>(a.offset) + (int64_t(tile) * 16 + r) * fours(a);
}

// What a thread needs to finish one output; loaded when its tile begins, used when the tile ends. Only the residual is
// what another kernel may still write.
template <class F, class T> struct Output {
    float scale[2] = {1.f, 1.f};
    uint32_t bias[2] = {0, 0}, residual = 0;  // as bits: converting them here would wait for them here
    int token, column = -1;                   // of y; none
    float beside[2] = {0.f, 0.f};             // outliers' products
    Words4 outliers[COMPACT<F> ? 2 : 1];      // the first of each row
    static DEVICE uint32_t bits(const void* from, int64_t i) {
        return load_activation2(static_cast<const uint16_t*>(from) + i);
    }
    // `seat`: token * 16 + row of the tile.
    DEVICE Output(const GemvArgs& a, const GemvPlan& plan, int tile, int seat) {
        const bool gate = a.activation == ACT_SILU_GATE;
        const int row = seat & 15, half = int(a.n / 2), n = gate ? tile * 8 + row : tile * 16 + row;
        token = seat >> 4;
        if (token >= a.m || tile >= plan.tiles || n >= (gate ? half : int(a.n)) || (gate && row >= 8)) return;
        column = n;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i && !gate) break;
            const int r = i ? n + half : n;
            if (F::GROUPS == 0 && a.scale)
                scale[i] = static_cast<const float*>(a.scale)[COMPACT<F> ? tile * 16 + row + 8 * i : r];
            if (a.bias) bias[i] = bits(a.bias, r);
            if constexpr (COMPACT<F>) outliers[i] = *outliers_of<F>(a, tile, row + 8 * i);
        }
    }
    DEVICE void load_residual(const GemvArgs& a) {
        if (a.residual && column >= 0) residual = bits(a.residual, token * a.residual_stride + column);
    }
    template <bool COMMON> DEVICE void store(const GemvArgs& a, float first, float second) const {
        const auto fully_staged = [&](float sum, int i) ALWAYS_INLINE {
            return sum * scale[i] + (COMPACT<F> ? beside[i] + T::up(bias[i]) : T::up(bias[i]));
        };
        float v = fully_staged(first, 0);
        if (a.activation == ACT_SILU_GATE) v = silu(v) * fully_staged(second, 1);
        else if (!COMMON && a.activation != ACT_NONE) v = activate(v, a.activation);
        store_activation2(static_cast<uint16_t*>(a.y) + token * a.y_stride + column, T::down(v + T::up(residual)));
    }
};

// The products with a token's values that are not finite: they alone decide what its sum comes to. `none`: where there
// are none.
template <class F, class NORMS>
DEVICE float unbounded_sum(
    const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, int tile, int r, int token, float none = 0.f) {
    const float mean = a.norm ? norms.mean(token) : 0.f, factor = a.norm ? norms.scale(token) : 0.f;
    const int64_t sets = scale_sets<F>(a, plan);
    const char* row = static_cast<const char*>(a.w);
    if (F::TILED) row += int64_t(tile) * plan.steps * F::STEP_BYTES + r * 64;
    else row += min(weight_row(a, tile, r), a.n - 1) * row_bytes<F>(a);
    float sum = 0.f;
    bool found = false;
#pragma unroll 1
    for (int k = 0; k < int(a.k); ++k) {
        const float x = norms.value(token, k, mean, factor);
        if (fabsf(x) < INFINITY) continue;
        found = true;
        float scale = 1.f, offset = 0.f;
        if constexpr (F::GROUPS > 0) {
            const int step = k / F::KSTEP, group = k % F::KSTEP / (F::KSTEP / F::GROUPS);
            const int64_t at = ((tile * sets + (step >> a.group_shift)) * 8 + r % 8) * F::GROUPS + group;
            scale = table_value(static_cast<const uint32_t*>(a.scale)[at], r / 8, a.scale_is_bf16);
            if (F::OFFSET != OFFSET_NONE)
                offset = table_value(static_cast<const uint32_t*>(a.offset)[at], r / 8, a.scale_is_bf16);
        }
        sum += x * F::value(row, k, scale, offset);
    }
    return found ? sum : none;
}

// What a product sees of a token's value k.
template <class T, class NORMS>
DEVICE float staged_value(const GemvPlan& plan, const NORMS& norms, const char* shared, int token, int k) {
    return plan.staged_k_tiles == plan.k_tiles
               ? T::up(*reinterpret_cast<const uint16_t*>(shared + token * plan.token_stride + k * 2))
               : norms.value(token, k, 0.f, 0.f);
}

// A row's outliers times a token's activations, less what stands for them among the codes. `next`: the first four.
template <class F, class T, class NORMS>
DEVICE float outlier_sum(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, const char* shared, Words4 next,
    float scale, int tile, int r, int token) {
    const float coded = Bf16::up(F::LEAST) * scale;
    float sum = 0.f;
#pragma unroll 1
    for (int four = 0;;) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = word_of(next, i), k = word & 0xffffu;
            if (k == 0xffffu) return sum;
            sum = fmaf(Bf16::up_high(word) - coded, staged_value<T>(plan, norms, shared, token, k), sum);
        }
        if (++four == fours(a)) return sum;
        next = outliers_of<F>(a, tile, r)[four];
    }
}

// A row's product with a token value by value, where the sum of codes is not finite: an infinity times an outlier's
// code is none times the outlier, and codes are larger than what they stand for.
template <class F, class T, class NORMS>
DEVICE float careful_sum(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, const char* shared, float scale,
    int tile, int r, int token) {
    const char* from = static_cast<const char*>(a.w) + int64_t(tile) * plan.steps * F::STEP_BYTES;
    const uint32_t* outlier = reinterpret_cast<const uint32_t*>(outliers_of<F>(a, tile, r));
    int left = 4 * fours(a);  // of outliers, which come by column
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < int(a.k); ++k) {
        const float x = staged_value<T>(plan, norms, shared, token, k);
        if (x != x) return x;
        float w = F::value(from, r, k) * scale;
        if (left && int(*outlier & 0xffffu) == k) w = Bf16::up_high(*outlier), ++outlier, --left;
        sum = fmaf(w, x, sum);
    }
    return sum;
}

// Before a block touches activations, and when it has worked out where they lie: the kernel before has ended, or has
// signalled those that come early. A signal that nobody waits for is cleared.
DEVICE void wait_grid_or_signal(const GemvArgs& a, const GemvPlan& plan) {
    if (!plan.signalled_k_tiles) {
        grid_wait();
        if (a.consumer && blockIdx.x == 0 && threadIdx.x == 0) a.consumer[0] = 0;
    } else {
        if (threadIdx.x == 0) signal_wait(a.consumer, int(a.consumer_columns), a.m > 1);
        __syncthreads();
    }
}
// Behind the wait for the end of the kernel before: the last block to come here clears the signal of that one. One warp
// finds out whether it is in that block, while the others go on: it takes half a microsecond.
DEVICE void reset_signal(const GemvArgs& a) {
    if (threadIdx.x == THREADS - 1 && last_call(a.consumer + 1, int(gridDim.x))) a.consumer[0] = 0;
}

// A warp's stages from step `from` to `end`; activations are staged from step `begin` on.
template <bool BF16_SCALES, class F, int DEPTH, class SUMS>
DEVICE void sweep(
    Stream<F, DEPTH>& stream, SUMS& total, const typename SUMS::Place& place, int from, int end, int begin) {
#pragma unroll 1
    for (int step = from; step < end; step += stream.stride) {
        Slot<F> now[PAIR<F>];
        stream.consume(now);
        total.template multiply_stage<BF16_SCALES>(now, place, step - begin);
    }
}

// NARROW: up to NARROW_TOKENS tokens. DEPTH: of the multi-stage buffer.
template <class F, class T, bool NARROW, int DEPTH>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT) gemv_kernel(const GemvArgs a, const GemvPlan plan) {
    using Sums = SumsFor<F, T, NARROW>;
    extern __shared__ __align__(128) char shared[];
    // WK warps share a tile, WN tiles are under way.
    const int WK = 1 << plan.warps_shift, WN = WARPS >> plan.warps_shift;
    const int warp = threadIdx.x / WARP_SIZE, wk = warp & (WK - 1), wn = warp >> plan.warps_shift;
    grid_release();
    using Flow = Stream<F, DEPTH>;
    Flow stream(
        a, plan, wk, tile_of(plan, 0, wn), shared + plan.stages_at + warp * DEPTH * Flow::STAGE_BYTES + lane_id() * 16);
    constexpr bool COMMON = DEPTH > SHALLOW;
    using Stager = typename Sums::template Stager<COMMON>;
    Stager stager(a, plan, shared);
    // A tile's sums are added up by one of its warps, another one each round, while the others go on; a warp waits for
    // all once in WK rounds, so a buffer of WK is free again when it is needed. Many tokens: by all warps.
    const auto adds = [&](int round) { return NARROW ? wk == (round & (WK - 1)) : true; };
    const int seat = NARROW ? lane_id() : threadIdx.x & (WK * WARP_SIZE - 1);
    Output<F, T> output(a, plan, adds(0) ? tile_of(plan, 0, wn) : plan.tiles, seat);
    const typename Sums::Place place(a, plan, shared);
    const bool fully_staged = plan.staged_k_tiles == plan.k_tiles;
    int there = 0;  // up to which K tile K is staged; 0: it is to be staged anew
    bool begun = false;
    int tile = tile_of(plan, 0, wn);
    for (int round = 0; tile - wn * int(gridDim.x) < plan.tiles; ++round, tile += plan.tile_hop) {
        const bool adder = adds(round);
        if (adder && round > 0) output = Output<F, T>(a, plan, tile, seat);
        Sums total;
        total.zero();
        for (int k_tile = 0; k_tile < plan.k_tiles;) {
            const int k_tile_begin = k_tile * plan.k_tile_steps, begin = fully_staged ? 0 : k_tile_begin;
            if (k_tile >= there) {
                const bool rest = begun && fully_staged;
                if (rest) grid_wait();
                else if (begun) __syncthreads();
                there = !fully_staged                     ? k_tile + 1
                        : k_tile < plan.signalled_k_tiles ? plan.signalled_k_tiles
                                                          : plan.k_tiles;
                const auto wait = [&]() ALWAYS_INLINE {
                    if (!begun) wait_grid_or_signal(a, plan);
                };
                stager.range(k_tile_begin, min(plan.steps, there * plan.k_tile_steps) - k_tile_begin,
                    k_tile_begin - begin, wait, [&]() ALWAYS_INLINE { return begun ? 0 : stream.fill(); });
                begun = true;
                if (rest) reset_signal(a);
            }
            if (adder && k_tile == 0) output.load_residual(a);
            const int from = k_tile_begin + stream.first, end = min(plan.steps, there * plan.k_tile_steps);
            k_tile = there;
            if (!fully_staged) there = 0;
            if (tile >= plan.tiles) continue;
            if (F::GROUPS && a.scale_is_bf16) sweep<true>(stream, total, place, from, end, begin);
            else sweep<false>(stream, total, place, from, end, begin);
        }
        total.finish();
        // [token][warp][PARTIAL_STRIDE]
        const int buffer = round & (plan.partial_buffers - 1);
        float* partial =
            reinterpret_cast<float*>(shared + plan.partial_at) + (buffer * WN + wn) * int(a.m) * WK * PARTIAL_STRIDE;
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
        if (output.column >= 0) {
            float first = 0.f, second = 0.f;
            const float* mine = partial + (seat >> 4) * WK * PARTIAL_STRIDE + (seat & 15);
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
            if constexpr (COMPACT<F>) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (i && !gate) break;
                    const int r = (seat & 15) + 8 * i;
                    output.beside[i] = outlier_sum<F, T>(
                        a, plan, stager, shared, output.outliers[i], output.scale[i], tile, r, seat >> 4);
                    if (RARELY(!(fabsf(fmaf(i ? second : first, output.scale[i], output.beside[i])) < INFINITY)))
                        output.beside[i] =
                            careful_sum<F, T>(a, plan, stager, shared, output.scale[i], tile, r, seat >> 4),
                        output.scale[i] = 0.f, (i ? second : first) = 0.f;
                }
            }
            if constexpr (Stager::BOUNDED) {
                if (RARELY(
                        first != first || second != second)) {  // a value that is not finite, or weights that are none
#pragma unroll 1
                    for (int r = seat & 15, i = 0; r < 16; r += 8, ++i) {
                        const float made = unbounded_sum<F>(a, plan, stager, tile, r, seat >> 4, i ? second : first);
                        if (i) second = made;
                        else first = made;
                    }
                }
            }
            output.template store<COMMON>(a, first, second);
        }
        if (tile < plan.signalled && tile + plan.tile_hop >= plan.signalled) {
            if (NARROW || a.m <= NARROW_TOKENS) warp_sync();
            else group_sync(name, WK * WARP_SIZE);  // other warps have stored the tokens from the third on
            if ((NARROW || wk == 0) && lane_id() == 0) {
                const int columns = (round + 1) * (a.activation == ACT_SILU_GATE ? 8 : 16);
                if (a.m == 1) signal_add<false>(a.producer, columns);
                else signal_add<true>(a.producer, columns);
            }
        }
        if (!NARROW && plan.partial_buffers == 1) group_sync(name, WK * WARP_SIZE);
    }
    if (!begun) grid_wait();  // no tile
    if (plan.signalled_k_tiles && there < plan.k_tiles) reset_signal(a);
}
