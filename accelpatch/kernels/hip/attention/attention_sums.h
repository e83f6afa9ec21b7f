// Reduction of the warps' partial softmax states, and of those of KV splits, to y. The order of the sums never depends
// on which warp or block computes them.
#pragma once
#include "attention_partials.h"

// Reduces one query's states of all warps, in one warp, and stores the result in y where there is only one KV split;
// else passes it up the reduction tree.
template <class T, int WIDE> struct Adder {
    // Columns that the lanes of a warp have at once, and how many such strips a head has.
    static constexpr int COLUMNS = WARP_SIZE * 4, STRIPS = (WIDE + COLUMNS - 1) / COLUMNS;
    const AttentionArgs& a;
    const Segment& s;
    const int token;          // of the query
    const int head;           // of all heads
    uint16_t* y;              // of the query
    Partials<WIDE> partials;  // of its KV splits

    DEVICE Adder(const AttentionArgs& a, const AttentionPlan& plan, const Segment& s, int q)
        : a(a),
          s(s),
          token(a.tokens == 1 ? 0 : (s.tile * QUERIES + q) / plan.group),
          head(s.kv * plan.group + s.tile * QUERIES + q - token * plan.group) {
        y = static_cast<uint16_t*>(a.y) + int64_t((s.row * int(a.tokens) + token) * int(a.heads) + head) * int(a.size);
        partials.memory =
            a.partials + int64_t(s.head * plan.queries + q) * (int(a.splits) * (WIDE / PIECE * PIECE_FLOATS));
    }
    // The factor of the sums at the end. A sink is a further score, whose value is zero.
    DEVICE float inverse_of(const Part& part) const {
        if (!a.sinks) return fast_reciprocal(part.total);
        const float sink = a.sinks[head] * 1.44269504f, most = fmaxf(part.highest, sink),
                    before = fast_exp2(part.highest - most);
        return before * fast_reciprocal(fmaf(part.total, before, fast_exp2(sink - most)));
    }
    DEVICE void store(int column, const Part& part) const {
        const float inverse = inverse_of(part);
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            *reinterpret_cast<uint32_t*>(y + column + i) =
                T::down_pair((part.sums[i] + 0.f) * inverse, (part.sums[i + 1] + 0.f) * inverse);
    }
    // Reduces a KV split. Precondition: all lanes of the warp call it, and a barrier has made the warps' states
    // visible. value: of the query's own slot, whose score warp `owner` has; null where that slot is not in the KV
    // split. level_sums: the query's memory for level sums.
    DEVICE void add(const float* states, const float* tops, int split, const char* value, int owner, float* level_sums,
        int levels) const {
        float one[STRIPS][WARPS][4], known[2 * WARPS];  // all loads are started before the first is needed
#pragma unroll
        for (int w = 0; w < WARPS; w += 2) load_floats<4>(known + 2 * w, tops + 2 * w);
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                load_floats<4>(
                    one[strip][w], states + w * WARP_STRIDE<WIDE> + min(lane_id() * 4 + strip * COLUMNS, WIDE - 4));
        float highest = -INFINITY, total = 0.f, factor[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, known[2 * w]);
        const float base = highest == -INFINITY ? 0.f : highest;
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            factor[w] = fast_exp2(known[2 * w] - base), total = fmaf(factor[w], known[2 * w + 1], total);
        const float own = value ? tops[2 * WARPS] * fast_exp2(tops[2 * owner] - base) : 0.f;
        Part parts[STRIPS];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            Part& part = parts[strip];
            part.highest = fmaxf(highest, LEAST), part.total = total;
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
#pragma unroll
                for (int i = 0; i < 4; ++i) part.sums[i] = fmaf(factor[w], one[strip][w][i], part.sums[i]);
            const int column = lane_id() * 4 + strip * COLUMNS;
            if (value && column < int(a.size))
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    part.sums[i] = fmaf(own, fresh_number<T, WIDE>(value, column + i), part.sums[i]);
            if (s.single() && column < int(a.size)) store(column, part);
        }
        if (!s.single()) pass(split, parts, level_sums, levels);
    }
    // Takes over the levels of the tree that the block before has computed, one subtree of each size. It spins until
    // that block has stored them. Precondition: all lanes of the warp call it; it ends with a warp barrier.
    DEVICE void go_on(float* level_sums) const {
#pragma unroll 1
        for (int splits = 1; splits <= s.split; splits *= 2, level_sums += LEVEL_FLOATS<WIDE>) {
            const int subtree = s.split & -2 * splits;
            if (!(s.split & splits) || subtree + splits <= s.first) continue;
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                const int column = lane_id() * 4 + strip * COLUMNS;
                const auto seen = partials.await(subtree, column, column < int(a.size));
                if (column >= int(a.size)) continue;
                *reinterpret_cast<Words4*>(level_sums + column) = seen.sums;
                if (column == 0)
                    level_sums[WIDE] = bits_to_float(seen.head.x), level_sums[WIDE + 1] = bits_to_float(seen.head.y);
            }
        }
        warp_sync();
    }
    // Passes a KV split's state up the tree, as far as this block has all KV splits of a subtree. Where the block has
    // more of the parent still to compute, the state waits in level_sums.
    DEVICE void pass(int split, Part* parts, float* level_sums, int levels) const {
        const bool alone = s.alone(levels);
        const int from = s.second_of_pair(levels) ? s.first : s.split, most = s.most(levels);
        int splits = 1;
#pragma unroll 1
        for (;; splits *= 2, level_sums += LEVEL_FLOATS<WIDE>) {
            const int base = split & -(2 * splits), begin = max(base, s.first),
                      end = min(base + 2 * splits - 1, s.last);
            const bool kept = splits < most && begin >= from && end < s.split + s.count, waits = split < end,
                       second = split >= base + splits && begin < base + splits;
            if (kept && !waits && !second) continue;
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                const int column = lane_id() * 4 + strip * COLUMNS;
                Part& part = parts[strip];
                float* at = level_sums + column;
                if (column >= int(a.size)) continue;
                if (!kept && alone && !s.first_of_pair()) {
                    store(column, part);
                } else if (!kept) {
                    partials.keep(split & -splits, splits, column, part);
                } else if (waits) {
                    *reinterpret_cast<Words4*>(at) = {float_to_bits(part.sums[0]), float_to_bits(part.sums[1]),
                        float_to_bits(part.sums[2]), float_to_bits(part.sums[3])};
                    if (column == 0) level_sums[WIDE] = part.highest, level_sums[WIDE + 1] = part.total;
                } else {
                    Part before;
                    before.highest = level_sums[WIDE], before.total = level_sums[WIDE + 1],
                    load_floats<4>(before.sums, at);
                    before.merge(part), part = before;
                }
            }
            if (!kept || waits) return;
        }
    }
};

// Counts `mine` of `due` partial states; whether these were the last. If so, what all other blocks have stored is
// visible. Precondition: every thread of the block calls it. It has two barriers. word: in shared memory, which nothing
// else uses between them.
DEVICE bool last_of(int32_t* counter, int mine, int due, char* word) {
    volatile int* flag = reinterpret_cast<int*>(word);
    publish();
    __syncthreads();  // all warps have published their partial states
    if (threadIdx.x == 0) {
        const bool last = count_up(counter, mine) + mine == due;
        if (last) *counter = 0;  // for the next launch
        *flag = last;
    }
    __syncthreads();
    return *flag;
}

// Reduces the partial states that a head's blocks have stored. Each of these blocks reduces some of the columns, and
// spins until the states arrive; where blocks cannot wait for each other, the last block reduces all. warp: the number
// of the calling warp.
template <class T, int WIDE>
DEVICE void add_splits(const AttentionArgs& a, const Segment& s, const AttentionPlan& plan, int queries, int part,
    int parts, bool halves, int warp) {
    constexpr int PIECES = WIDE / PIECE;
#pragma unroll 1
    for (int i = part + warp * parts; i < queries * PIECES; i += WARPS * parts) {
        const Adder<T, WIDE> adder(a, plan, s, i / PIECES);
        Gatherer<WIDE> gatherer(adder.partials, s.first, s.last, i % PIECES, int(a.size));
        const Part all = gatherer.all(halves);
        if (lane_id() < 4 && gatherer.mine) adder.store(gatherer.column, all);
    }
}
