// Results of waves on their way to y, added up in an order that never depends on who adds.
#pragma once
#include "attention_records.h"

// One query's results of all waves, by one wave, and on from there: into y where there is but one span, else to what they are added up with.
template <class T, int WIDE> struct Adder {
    static constexpr int COLUMNS = WAVE * 4, STRIPS = (WIDE + COLUMNS - 1) / COLUMNS;  // columns of all lanes; how often
    const AttentionArgs& a;
    const Segment& s;
    const int token;        // of the query
    uint16_t* y;            // of the query
    Records<WIDE> records;  // of its spans

    DEVICE Adder(const AttentionArgs& a, const AttentionPlan& plan, const Segment& s, int q) : a(a), s(s), token(a.tokens == 1 ? 0 : (s.tile * QUERIES + q) / plan.group) {
        const int of = s.tile * QUERIES + q, head = s.kv * plan.group + of - token * plan.group;
        y = static_cast<uint16_t*>(a.y) + int64_t((s.row * int(a.tokens) + token) * int(a.heads) + head) * int(a.size);
        records.memory = a.records + int64_t(s.head * plan.queries + q) * (int(a.spans) * (WIDE / PIECE * PIECE_FLOATS));
    }
    DEVICE void store(int column, const Part& part) const {
        const float share = fast_reciprocal(part.total);
#pragma unroll
        for (int i = 0; i < 4; i += 2) *reinterpret_cast<uint32_t*>(y + column + i) = T::down_pair((part.sums[i] + 0.f) * share, (part.sums[i + 1] + 0.f) * share);
    }
    // value: of the query's own slot, which wave `owner` has seen; null where that is not in the span. nodes: memory of the query's.
    DEVICE void add(const float* states, const float* tops, int span, const uint16_t* value, int owner, float* nodes, int levels) const {
        float one[STRIPS][WAVES][4], known[2 * WAVES];  // all are under way before the first is needed
#pragma unroll
        for (int w = 0; w < WAVES; w += 2) load_floats<4>(known + 2 * w, tops + 2 * w);
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int w = 0; w < WAVES; ++w) load_floats<4>(one[strip][w], states + w * WAVE_STRIDE<WIDE> + min(lane_id() * 4 + strip * COLUMNS, WIDE - 4));
        float highest = -INFINITY, total = 0.f, factor[WAVES];
#pragma unroll
        for (int w = 0; w < WAVES; ++w) highest = fmaxf(highest, known[2 * w]);
        const float base = highest == -INFINITY ? 0.f : highest;
#pragma unroll
        for (int w = 0; w < WAVES; ++w) factor[w] = fast_exp2(known[2 * w] - base), total = fmaf(factor[w], known[2 * w + 1], total);
        const float own = value ? tops[2 * WAVES] * fast_exp2(tops[2 * owner] - base) : 0.f;
        Part parts[STRIPS];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            Part& part = parts[strip];
            part.highest = fmaxf(highest, LEAST), part.total = total;
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int i = 0; i < 4; ++i) part.sums[i] = fmaf(factor[w], one[strip][w][i], part.sums[i]);
            const int column = lane_id() * 4 + strip * COLUMNS;
            if (value && column < int(a.size))
#pragma unroll
                for (int i = 0; i < 4; ++i) part.sums[i] = fmaf(own, T::up(value[column + i]), part.sums[i]);
            if (s.single() && column < int(a.size)) store(column, part);
        }
        if (!s.single()) pass(span, parts, nodes, levels);
    }
    // What the block before has of the tree becomes this block's: a node of each size that its spans give.
    DEVICE void go_on(float* nodes) const {
#pragma unroll 1
        for (int spans = 1; spans <= s.span; spans *= 2, nodes += NODE_FLOATS<WIDE>) {
            const int node = s.span & -2 * spans;
            if (!(s.span & spans) || node + spans <= s.first) continue;
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                const int column = lane_id() * 4 + strip * COLUMNS;
                const auto seen = records.await(node, column, column < int(a.size));
                if (column >= int(a.size)) continue;
                *reinterpret_cast<Words4*>(nodes + column) = seen.sums;
                if (column == 0) nodes[WIDE] = bits_to_float(seen.head.x), nodes[WIDE + 1] = bits_to_float(seen.head.y);
            }
        }
        wave_sync();
    }
    // A span's result goes up the tree as far as the block has all of a node's spans; where more of a parent comes, it waits for it.
    DEVICE void pass(int span, Part* parts, float* nodes, int levels) const {
        const bool alone = s.alone(levels);
        const int from = s.goes_on(levels) ? s.first : s.span, most = s.most(levels);
        int spans = 1;
#pragma unroll 1
        for (;; spans *= 2, nodes += NODE_FLOATS<WIDE>) {
            const int base = span & -(2 * spans), begin = max(base, s.first), end = min(base + 2 * spans - 1, s.last);
            const bool kept = spans < most && begin >= from && end < s.span + s.count, waits = span < end, second = span >= base + spans && begin < base + spans;
            if (kept && !waits && !second) continue;
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                const int column = lane_id() * 4 + strip * COLUMNS;
                Part& part = parts[strip];
                float* at = nodes + column;
                if (column >= int(a.size)) continue;
                if (!kept && alone && !s.hands_on()) {
                    store(column, part);
                } else if (!kept) {
                    records.keep(span & -spans, spans, column, part);
                } else if (waits) {
                    *reinterpret_cast<Words4*>(at) = {float_to_bits(part.sums[0]), float_to_bits(part.sums[1]), float_to_bits(part.sums[2]), float_to_bits(part.sums[3])};
                    if (column == 0) nodes[WIDE] = part.highest, nodes[WIDE + 1] = part.total;
                } else {
                    Part before;
                    before.highest = nodes[WIDE], before.total = nodes[WIDE + 1], load_floats<4>(before.sums, at);
                    before.take(part), part = before;
                }
            }
            if (!kept || waits) return;
        }
    }
};

// Whether this block brings the last of what is counted, `mine` of `due`; what the others brought is then in memory. Every
// thread calls it. flag: a word of shared memory that nobody else uses between the barriers around it.
DEVICE bool last_of(int32_t* counter, int mine, int due, volatile int* flag) {
    publish();
    __syncthreads();  // all waves' records are out
    if (threadIdx.x == 0) {
        const bool last = count_up(counter, mine) + mine == due;
        if (last) *counter = 0;  // for the next launch
        *flag = last;
    }
    __syncthreads();
    return *flag;
}

// What a head's blocks have brought is added up: by all of them, each some of the columns, as the records come; or by the last one, where
// blocks do not wait for each other. wave: which of the block's comes to it.
template <class T, int WIDE> DEVICE void add_spans(const AttentionArgs& a, const Segment& s, const AttentionPlan& plan, int queries, int part, int parts, bool halves, int wave) {
    constexpr int PIECES = WIDE / PIECE;
#pragma unroll 1
    for (int i = part + wave * parts; i < queries * PIECES; i += WAVES * parts) {
        const Adder<T, WIDE> adder(a, plan, s, i / PIECES);
        Gatherer<WIDE> gatherer(adder.records, s.first, s.last, i % PIECES, int(a.size));
        const Part all = gatherer.all(halves);
        if (lane_id() < 4 && gatherer.mine) adder.store(gatherer.column, all);
    }
}
