// The kernel of decode_attention. Where the linear layer before signals q and k, it starts with them, and computes all
// but the part of the new token's own value while that layer still computes v. A block takes one KV split after
// another. Each warp computes the softmax of its own tiles, relative to its own largest score, and the warps' states
// are reduced through shared memory.
#pragma once
#include "attention_kinds.h"
#include "attention_schedule.h"
#include "attention_softmax.h"
#include "attention_sums.h"

// Prefetches what the next kernel will read into L2, in the blocks without work, once the other blocks have their
// queries. busy: how many blocks have KV splits; before: how many of these come before this block.
DEVICE void bring_following(const AttentionArgs& a, int before, int busy) {
    const int64_t idle = int64_t(gridDim.x) - busy, piece = int64_t(blockIdx.x) - before + threadIdx.x * idle;
    if (threadIdx.x < BROUGHT_PIECES && piece < a.following_bytes / BROUGHT_PIECE)
        prefetch_l2(static_cast<const char*>(a.following) + piece * BROUGHT_PIECE, BROUGHT_PIECE);
}

// Resets the signal of the kernel before, in the last block that calls it. Precondition: the block has waited for that
// kernel's end. One thread of `warp` counts the block, while the other warps go on.
DEVICE void forget(const AttentionArgs& a, int warp) {
    if (a.consumer && int(threadIdx.x) == warp * WARP_SIZE && last_call(a.consumer + 1, int(gridDim.x)))
        a.consumer[0] = 0;
}

// The whole of a block that has no KV splits. It stays until a block of the next kernel has started on every SM.
DEVICE void idle(const AttentionArgs& a, int before, int busy) {
    grid_wait();
    forget(a, 0);
    linger();
    bring_following(a, before, busy);
}

// Waits until q and k may be read: for the end of the kernel before, or for its signal. Precondition: all threads of
// the block call it. begun: the block has waited for the signal already.
DEVICE void wait_for_queries(const AttentionArgs& a, bool begun) {
    if (!a.consumer) {
        grid_wait();
    } else if (!begun) {
        if (threadIdx.x == 0) signal_wait(a.consumer, int(a.consumer_columns), a.rows > 1);
        __syncthreads();
    }
}

// Where in shared memory a query's partial states wait for the next KV split's, one for each level of the tree.
template <int WIDE> DEVICE float* level_sums_of(const AttentionPlan& plan, char* shared, int q) {
    return reinterpret_cast<float*>(shared + plan.level_sums_at) + q * (plan.levels * LEVEL_FLOATS<WIDE>);
}

// BUFFER_BYTES: bytes of a block's multi-stage buffer.
template <class T, int WIDE, int BUFFER_BYTES, Kind KIND>
__global__ void __launch_bounds__(THREADS, WIDE > 128 ? 1 : BLOCKS_RESIDENT)
    attention_kernel(const AttentionArgs given, const AttentionPlan laid_out) {
    const AttentionArgs a = known<KIND, WIDE>(given);
    const AttentionPlan plan = known<KIND>(laid_out);
    extern __shared__ __align__(128) char shared[];
    using Mine = typename ScheduleOf<DYNAMIC<KIND>>::Type;
    using Results = Softmax<T, WIDE, BUFFER_BYTES, ONE_TILE<KIND>, SOLE_QUERY<KIND>, Mine>;
    grid_release();
    const Geometry all(a, plan, shared);
    const int warp = threadIdx.x / WARP_SIZE;
    const Mine all_work(all, a);  // copied, since the stream goes through it ahead of the block
    Mine schedule = all_work;
    Segment s;
    if (!schedule.begin(s, a, plan, all)) return idle(a, schedule.before, schedule.busy);
    typename Results::Stream stream(a, plan, all, FIRST_KNOWN ? schedule : all_work, s, shared);
    HeadStager<T, WIDE> stager{a, plan, shared, LATE_WORDS<KIND> && a.consumer && a.rows == 1};
    int iteration = 0;
    bool left = false, several = false;  // splits are left to reduce across blocks; there are several segments
    for (bool begun = false;; begun = true) {
        stager.switch_to(s.row);
        const View<T, WIDE> view(a, stager, s);
        const auto first = stager.task(s, warp);
        const typename HeadStager<T, WIDE>::Angles rotation(a, stager.angles(first.token));
        wait_for_queries(a, begun);
        stager.stage(s, first, rotation);
        const int queries = stager.queries(s);
#pragma unroll 1
        for (int i = 0; i < s.count; ++i, ++iteration) {
            if constexpr (DYNAMIC<KIND>) all_work.follow(s, i, a, plan, all);
            Results results;
            const int begin = s.begin + i * KV_SPLIT;
            results.split(a, stream, view, begin);
            if (a.consumer && i + 1 == s.count) stager.wait_for_value(s, begin, warp);
            const int buffer = (plan.buffers - 1) & iteration;
            float* tops = reinterpret_cast<float*>(shared + plan.tops_at) + buffer * plan.queries * TOPS;
            float* states =
                reinterpret_cast<float*>(shared + plan.states_at) + buffer * plan.queries * QUERY_STRIDE<WIDE>;
            results.leave(states, tops, queries);
            const int q = (warp - iteration) & (WARPS - 1);  // one warp reduces a query, while the others go on
            const Adder<T, WIDE> adder(a, plan, s, q);
            __syncthreads();
            if (!begun && i + 1 == s.count && q == WARPS - 1) forget(a, warp);
            const int own = s.slot + adder.token - begin;
            const bool here = own >= 0 && own < KV_SPLIT;
            float* subtrees = level_sums_of<WIDE>(plan, shared, q);
            if (RARELY(BLOCKS_MEET && a.rows > 1 && q < queries && i == 0 && s.second_of_pair(plan.levels)))
                adder.go_on(subtrees);
            if (q < queries)
                adder.add(states + q * QUERY_STRIDE<WIDE>, tops + q * TOPS, s.split + i,
                    here ? stager.value(adder.token) : nullptr, own / TILE & (WARPS - 1), subtrees, plan.levels);
            if (plan.buffers == 1) __syncthreads();
        }
        const bool alone = s.alone(plan.levels);
        if (!BLOCKS_MEET && !alone && last_of(a.finished + s.head, s.count, s.splits(), shared + plan.tops_at))
            add_splits<T, WIDE>(a, s, plan, queries, 0, 1, true, warp);
        left = left || !alone;
        if (!schedule.next(s, a, plan, all)) break;
        several = true;
        __syncthreads();  // all warps have read what is staged, and last_of's word
    }
    if constexpr (DYNAMIC<KIND>)
        if (all_work.items) {
            if (all_work.gathers(s, a, plan, all))
                add_splits<T, WIDE>(a, s, plan, stager.queries(s), all_work.part, all_work.parts, true, warp);
            return;
        }
    if (!BLOCKS_MEET || !left) return;                       // nothing is left to reduce across blocks
    int place = warp - (iteration - 1) - stager.queries(s);  // warps that had no query of the last KV split come first
    Mine again = schedule;
    if (several) again = all_work, again.next(s, a, plan, all);
    do {
        if (s.alone(plan.levels)) continue;
        int which, many;
        again.company(s, all, which, many);
        add_splits<T, WIDE>(a, s, plan, stager.queries(s), which, many, again.halves(all), place & (WARPS - 1));
        place -= (stager.queries(s) * (WIDE / PIECE) + many - 1) / many;  // the next head starts with other warps
    } while (again.next(s, a, plan, all));
}
