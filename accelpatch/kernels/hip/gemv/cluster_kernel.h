// The kernel for so many tokens that staging all of K would take a block too long. The warps that share a tile are
// spread over the blocks of a cluster, and each block stages only the activations of its own part of K. What a warp
// computes, and the order of a tile's reduction, are those of gemv_kernel; so the results are bit for bit the same.
//
// Each round another warp of a tile reduces it. The others send it their partial sums, a lane's four as 16 bytes
// through distributed shared memory, and go on. The reducing warp goes on too: it reduces the tile after it has
// computed its own sums of the next round. (Waiting at once made it late with these, and the next reducing warp waited
// for them.)
//
// Why a slot is empty when it is sent to again: each warp reduces its round before it sends the sums of a later one;
// and between two rounds that a warp reduces, each warp that sends to it has itself reduced a round for which that warp
// had sent. Why a block may end as soon as its warps have: one of them waits for everything that is sent to it.
#pragma once
#include <type_traits>

#include "cluster_output.h"
#include "cluster_stage.h"
#include "gemv_kernel.h"

constexpr int DSMEM_SLOT_BYTES = WARP_SIZE * 16;
// One mbarrier a warp, one for the norm's moments, one for the maxima of quantised tokens.
template <class F> constexpr int MBARRIERS = WARPS + 1 + QUANTIZES_ROWS<F>;

// A sum, float or integer, as the bits of a float and back.
DEVICE float as_bits(float sum) { return sum; }
DEVICE float as_bits(int sum) { return bits_to_float(uint32_t(sum)); }
template <class V> DEVICE V of_bits(float bits) {
    if constexpr (std::is_integral_v<V>) return V(float_to_bits(bits));
    else return bits;
}

// As sweep(), where the activations of the warp's stages are staged `hop` steps apart, from step `at` on.
template <bool BF16_SCALES, class FLOW, class SUMS>
DEVICE void sweep_scaled(
    FLOW& stream, SUMS& total, const typename SUMS::Place& place, int from, int end, int at, int hop) {
#pragma unroll 1
    for (int step = from; step < end; step += stream.stride, at += hop) {
        typename FLOW::Stage now;
        stream.consume(now);
        total.template multiply_stage<BF16_SCALES>(now, place, at);
    }
}

// Exchanges a lane's accumulators of one tile with those of the other, where two tiles share a staged K tile: the other
// tile's are parked in shared memory meanwhile. A lane reads only what it stored itself, so that no barrier is needed.
template <class SUMS> DEVICE void swap_parked(SUMS& sums, char* place) {
    static_assert(sizeof(SUMS) % 16 == 0, "whole words of four");
#pragma unroll
    for (int i = 0; i < int(sizeof(SUMS) / 16); ++i) {
        auto* mine = reinterpret_cast<typename SUMS::Value*>(&sums) + 4 * i;
        float* there = reinterpret_cast<float*>(place + i * DSMEM_SLOT_BYTES);
        float v[4];
        load_floats<4>(v, there);
        for (int j = 0; j < 4; ++j) there[j] = as_bits(mine[j]), mine[j] = of_bits<typename SUMS::Value>(v[j]);
    }
}

// Recomputes sums that are NaN, because an activation or a weight is not finite.
template <class F, class NORMS>
DEVICE void mend(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, int tile, float* sum, float* scratch) {
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) bad = bad || sum[i] != sum[i];
    if (!bad) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) scratch[i] = sum[i];
    int first = 0;
    compute_here(first), compute_here(tile);  // keeps the compiler from computing any of this earlier
#pragma unroll 1
    for (int i = first; i < 4; ++i) {
        const float v = scratch[i];
        const int token = Cells<false>::token(i);
        if (v != v && token < int(a.m))
            scratch[i] = unbounded_sum<F>(a, plan, norms, tile, Cells<false>::row(i), token, v);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = scratch[i];
}

// Addresses in shared memory, computed anew each time to save registers.
struct ClusterMemory {
    const GemvPlan& plan;
    DEVICE char* at(int place) const {
        extern __shared__ __align__(128) char shared[];
        compute_here(place);
        return shared + place;
    }
    DEVICE Mbarrier* mbarriers() const { return reinterpret_cast<Mbarrier*>(at(plan.mbarriers_at)); }
    DEVICE char* dsmem_slots() const { return at(plan.partial_at) + lane_id() * 16; }
    template <class SUMS> DEVICE char* parked(int warp) const {
        return at(plan.parked_at) + warp * int(sizeof(SUMS)) * WARP_SIZE + lane_id() * 16;
    }
};

// Which tiles a warp has a part of, and which part. WK warps share a tile, WB of them in this block.
template <class F> struct ClusterPlace {
    static_assert(CLUSTER <= 2, "its logarithm");
    const int wb_shift, WK, WB, rank, warp, wb, wk, wn;
    // A cluster's tiles of a round, and this warp's tile. They are neighbours for formats in tiles, whose weights are
    // then contiguous.
    const int clusters, cluster, round_tiles, first_tile, own_tile;
    DEVICE ClusterPlace(const GemvPlan& plan)
        : wb_shift(plan.warps_shift - 1),
          WK(1 << plan.warps_shift),
          WB(1 << wb_shift),
          rank(cluster_rank()),
          warp(threadIdx.x / WARP_SIZE),
          wb(warp & (WB - 1)),
          wk(rank * WB + wb),
          wn(warp >> wb_shift),
          clusters(int(gridDim.x / CLUSTER)),
          cluster(int(blockIdx.x / CLUSTER)),
          round_tiles(plan.tile_hop),
          first_tile(F::TILED ? cluster * (WARPS >> wb_shift) : cluster),
          own_tile(first_tile + wn * (F::TILED ? 1 : clusters)) {}
};

// Sends a lane's sums of a tile to the warp that reduces it, number `adder` of the WK that share it; integers as bits.
// Precondition: all lanes of the warp call it, and the reducing warp has read the slot (see above).
template <class F, class V>
DEVICE void send_sums(const ClusterMemory& memory, const ClusterPlace<F>& here, int adder, const V* sum) {
    const float bits[4] = {as_bits(sum[0]), as_bits(sum[1]), as_bits(sum[2]), as_bits(sum[3])};
    const int to = (here.wn << here.wb_shift) + (adder & here.WB - 1), sender = here.wk - (here.wk > adder);
    send16(memory.dsmem_slots() + (to * (here.WK - 1) + sender) * DSMEM_SLOT_BYTES, memory.mbarriers()[to],
        adder >> here.wb_shift, bits);
}

// As sweep(), over a block's part of K, in which the stages of its warps alternate.
template <class F, class FLOW, class SUMS>
DEVICE void sweep_part(const GemvArgs& a, const ClusterPlace<F>& here, FLOW& stream, SUMS& total,
    const typename SUMS::Place& place, int from, int end) {
    if (F::GROUPS && a.scale_is_bf16)
        sweep_scaled<true>(stream, total, place, from, end, here.wb * PAIR<F>, here.WB * PAIR<F>);
    else sweep_scaled<false>(stream, total, place, from, end, here.wb * PAIR<F>, here.WB * PAIR<F>);
}

// Reduces the tile of the round that is pending: this warp's own sums and those that the others send, for which it
// waits. Precondition: all lanes of the warp call it, once a round that the warp reduces.
template <class F, class T, class STAGER> struct TileAdder {
    using Value = typename SumsFor<F, T, false>::Value;
    int& pending;
    const ClusterPlace<F>& here;
    const ClusterMemory& memory;
    const GemvPlan& plan;
    const float (&own)[4];
    const GemvArgs& a;
    const STAGER& stager;
    const ClusterOutput<F, T>& output;
    bool& urgent;
    DEVICE void operator()() const {
        const int tile = pending * here.round_tiles + here.own_tile;
        char* mine = memory.dsmem_slots() + here.warp * (here.WK - 1) * DSMEM_SLOT_BYTES;
        const int added = pending >> plan.warps_shift;  // tiles, by this warp
        receive(memory.mbarriers()[here.warp], lane_id() == 0, (here.WK - 1) * DSMEM_SLOT_BYTES, added & 1);
        Value sum[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int begin = 0; begin < here.WK; begin += 4) {
            float v[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                load_floats<4>(
                    v[j], reinterpret_cast<const float*>(
                              mine + min(begin + j - (begin + j > here.wk), here.WK - 2) * DSMEM_SLOT_BYTES));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                for (int i = 0; i < 4; ++i) sum[i] += of_bits<Value>(begin + j == here.wk ? own[i] : v[j][i]);
        }
        if constexpr (STAGER::BOUNDED) mend<F>(a, plan, stager, tile, sum, reinterpret_cast<float*>(mine));
        if constexpr (QUANTIZES_ROWS<F>) output.store(tile, sum, stager.scales());
        else output.store(tile, sum, nullptr);
        pending = -1, urgent = false;
        if (tile >= plan.signalled || tile + here.WK * here.round_tiles < plan.signalled)
            return;  // or this warp reduces another such tile first
        warp_sync();
        if (lane_id() == 0) signal_add<true>(a.producer, (added + 1) * (a.activation == ACT_SILU_GATE ? 8 : 16));
    }
};

template <class F, class T, int DEPTH>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT) gemv_cluster_kernel(const GemvArgs a, const GemvPlan plan) {
    if constexpr (CLUSTERS_HERE) {
        using Sums = SumsFor<F, T, false>;
        using Stager = ClusterStager<F, T>;
        using Flow = Stream<F, DEPTH, true>;
        extern __shared__ __align__(128) char shared[];
        constexpr bool HASTY = !F::TILED;  // reduces signalled columns at once; slower for int4
        const ClusterPlace<F> here(plan);
        grid_release();
        const ClusterMemory memory{plan};
        if (threadIdx.x < MBARRIERS<F>) init_mbarrier(memory.mbarriers()[threadIdx.x]);
        cluster_arrive();
        Flow stream(a, plan, here.wk, here.own_tile,
            shared + plan.stages_at + here.warp * DEPTH * STREAM_STAGE_BYTES<F> + lane_id() * 16);
        const Part<F> part(plan, here.rank, memory.mbarriers() + WARPS);
        Stager stager(a, plan, shared, part);
        cluster_wait();
        const typename Sums::Place place(a, plan, shared);
        int staged = 0;  // K tiles that were staged so far
        Sums total;
        int pending = -1;     // the round whose tile this warp still has to reduce
        bool urgent = false;  // it reduces it at once, since the next kernel waits for its columns
        float own[4];         // its own sums of that tile
        ClusterOutput<F, T> output(a, plan);
        const TileAdder<F, T, Stager> add_up{pending, here, memory, plan, own, a, stager, output, urgent};
#pragma unroll 1
        for (int first_round = 0;; first_round += plan.rounds_at_once) {
            const bool more = first_round * here.round_tiles + here.first_tile < plan.tiles;
            if (!more && pending < 0) break;
            for (int begin = 0; begin < plan.part_steps; begin += plan.k_tile_steps) {
                const int k_tile_end = min(plan.part_steps, begin + plan.k_tile_steps);
                if (more && (!staged || plan.k_tiles > 1)) {
                    const bool signalled = staged && staged == plan.signalled_k_tiles;
                    const auto wait = [&]() ALWAYS_INLINE {
                        if (!staged) wait_grid_or_signal(a, plan);
                        else if (signalled) grid_wait();
                    };
                    stager.range(begin, k_tile_end - begin, staged, wait,
                        [&]() ALWAYS_INLINE { return staged ? 0 : stream.fill(); });
                    ++staged;
                    if (signalled) reset_signal(a);
                }
                int round = first_round;
#pragma unroll 1
                while (round < first_round + plan.rounds_at_once || urgent) {
                    const int tile = round * here.round_tiles + here.own_tile;
                    if (tile < plan.tiles && !urgent) {
                        if (plan.rounds_at_once > 1 && tile + (first_round + 1 - round) * here.round_tiles < plan.tiles)
                            swap_parked(total, memory.parked<Sums>(here.warp));  // of two tiles
                        if (begin == 0) total.zero();
                        if (k_tile_end == plan.part_steps && here.wk == ((here.wn + round) & (here.WK - 1)))
                            output.begin(tile);  // loaded while the tile is computed
                        const int from = begin * CLUSTER + stream.first, end = min(plan.steps, k_tile_end * CLUSTER);
                        sweep_part<F>(a, here, stream, total, place, from, end);
                    }
                    const bool now = urgent;
                    if (k_tile_end == plan.part_steps && pending >= 0) add_up();
                    if (now) continue;
                    ++round;
                    if (k_tile_end < plan.part_steps || tile >= plan.tiles) continue;
                    total.finish();
                    if (const int adder = (here.wn + round - 1) & (here.WK - 1); here.wk != adder) {
                        send_sums(memory, here, adder, total.sum);
                    } else {
                        pending = round - 1,
                        urgent = HASTY && tile < plan.signalled && tile + here.round_tiles >= plan.signalled;
                        for (int i = 0; i < 4; ++i) own[i] = as_bits(total.sum[i]);
                    }
                }
            }
        }
        if (staged) return;
        grid_wait();  // no tile
        if (plan.signalled_k_tiles) reset_signal(a);
    }
}
