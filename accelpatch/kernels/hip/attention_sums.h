// Results of waves and of spans on their way to y, added up in an order that never depends on who adds.
#pragma once
#include "attention.h"

constexpr float LEAST = -3.4e38f;  // as low as a highest score goes: infinities would have no difference

// One query's results of all waves, and then of all spans, by one wave.
template <class T, int WIDE> struct Adder {
    const AttentionArgs& a;
    const Segment& s;
    const int token;  // of the query
    uint16_t* y;      // of the query
    float* records;   // of its spans, and behind them of its runs

    DEVICE Adder(const AttentionArgs& a, const Segment& s, int group, int q) : a(a), s(s), token(a.tokens == 1 ? 0 : (s.tile * QUERIES + q) / group) {
        const int of = s.tile * QUERIES + q, head = s.kv * group + of - token * group;
        y = static_cast<uint16_t*>(a.y) + int64_t((s.row * int(a.tokens) + token) * int(a.heads) + head) * int(a.size);
        records = a.sums + int64_t(s.head * QUERIES + q) * (int(a.spans + a.runs) * (RECORD_HEAD + int(a.size)));
    }
    DEVICE void store(int column, const float* sums, float total) const {
        const float share = fast_reciprocal(total);
#pragma unroll
        for (int i = 0; i < 4; i += 2) *reinterpret_cast<uint32_t*>(y + column + i) = T::down_pair((sums[i] + 0.f) * share, (sums[i + 1] + 0.f) * share);
    }
    DEVICE float* record(int i) const { return records + i * (RECORD_HEAD + int(a.size)); }
    // Four columns into a record; negative: into y.
    DEVICE void put(int column, const float* sums, float total, int to) const {
        if (to < 0) store(column, sums, total);
        else *reinterpret_cast<Words4*>(record(to) + RECORD_HEAD + column) = {float_to_bits(sums[0]), float_to_bits(sums[1]), float_to_bits(sums[2]), float_to_bits(sums[3])};
    }
    // value: of the query's own slot, which wave `owner` has seen; null where that is not in the span.
    DEVICE void add(const float* states, const float* tops, int span, const uint16_t* value, int owner) const {
        constexpr int COLUMNS = WAVE * 4, STRIPS = (WIDE + COLUMNS - 1) / COLUMNS;  // columns of all lanes; how often
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
        if (!s.single() && lane_id() == 0) record(span)[0] = highest, record(span)[1] = total;
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fmaf(factor[w], one[strip][w][i], sums[i]);
            const int column = lane_id() * 4 + strip * COLUMNS;
            if (value && column < int(a.size))
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fmaf(own, T::up(value[column + i]), sums[i]);
            if (column < int(a.size)) put(column, sums, total, s.single() ? -1 : span);
        }
    }
    // Of records from `first` to `last`, into record `to` or, where that is negative, into y: those columns that are the wave's, every
    // `pieces`th strip of four lanes' columns. Four lanes have every GROUPSth record, counted from record `origin` and not from the first:
    // in longer company that is another one.
    template <int STRIPS> DEVICE void add_up(int piece, int pieces, int origin, int first, int last, int to) const {  // STRIPS: at once
        constexpr int COLUMNS = 16, GROUPS = WAVE / 4;  // columns of four lanes
        const int group = lane_id() / 4, column = lane_id() % 4 * 4, size = int(a.size);
        const int begin = first + ((group + origin - first) & (GROUPS - 1)), turns = (last - begin + GROUPS) / GROUPS;
#pragma unroll 1
        for (int strip = piece; strip * COLUMNS < size; strip += STRIPS * pieces) {
            float highest = -INFINITY, total = 0.f, sums[STRIPS][4] = {};
#pragma unroll(SHARED_RING ? 2 : 1)
            for (int turn = 0; turn < turns; ++turn) {
                const float* from = record(begin + turn * GROUPS);
                const Words4 head = load_activation16(from);
                Words4 one[STRIPS];
#pragma unroll
                for (int r = 0; r < STRIPS; ++r) {
                    const int at = (strip + r * pieces) * COLUMNS + column;
                    one[r] = {0, 0, 0, 0};
                    if (at < size) one[r] = load_activation16(from + RECORD_HEAD + at);
                }
                const float before = rebase(highest, bits_to_float(head.x)), factor = fast_exp2(bits_to_float(head.x) - highest);
                total = fmaf(factor, bits_to_float(head.y), total * before);
#pragma unroll
                for (int r = 0; r < STRIPS; ++r)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[r][j] = fmaf(factor, bits_to_float(word_of(one[r], j)), sums[r][j] * before);
            }
#pragma unroll
            for (int step = 4; step < WAVE; step *= 2) {
                const float other = lane_xor(highest, step), before = rebase(highest, other), factor = fast_exp2(other - highest);
                total = fmaf(factor, lane_xor(total, step), total * before);
#pragma unroll
                for (int r = 0; r < STRIPS; ++r)
                    if ((strip + r * pieces) * COLUMNS < size)
#pragma unroll
                        for (int j = 0; j < 4; ++j) sums[r][j] = fmaf(factor, lane_xor(sums[r][j], step), sums[r][j] * before);
            }
#pragma unroll
            for (int r = 0; r < STRIPS; ++r)
                if (const int at = (strip + r * pieces) * COLUMNS + column; group == 0 && at < size) put(at, sums[r], total, to);
            if (to >= 0 && strip == 0 && lane_id() == 0) record(to)[0] = highest, record(to)[1] = total;
        }
    }
    // `highest` takes in another score; the factor of what counted against it before. A number it stays, whatever it meets.
    static DEVICE float rebase(float& highest, float other) {
        const float before = highest;
        highest = fmaxf(fmaxf(highest, other), LEAST);
        return fast_exp2(before - highest);
    }
};

// Whether this block brings the last of what is counted, `mine` of `due`; what the others brought is then in memory. Every
// thread calls it. told: a word of shared memory that nobody else uses between the barriers around it.
DEVICE bool last_of(int32_t* counter, int mine, int due, volatile int* told) {
    publish();
    __syncthreads();  // all waves' records are out
    if (threadIdx.x == 0) {
        const bool last = count_up(counter, mine) + mine == due;
        if (last) *counter = 0;  // for the next launch
        *told = last;
    }
    __syncthreads();
    return *told;
}

// A segment's spans are in memory: what it is the last of is added up, runs and then the head's runs, by all waves: one or more a query.
template <class T, int WIDE> DEVICE void add_spans(const AttentionArgs& a, const Segment& s, const AttentionPlan& plan, int queries, volatile int* told) {
    const int wave = threadIdx.x / WAVE, pieces = queries == 1 ? WAVES : queries == 2 ? WAVES / 2 : queries <= 4 ? WAVES / 4 : WAVES / 8;
    const Adder<T, WIDE> adder(a, s, plan.group, wave / pieces);
    int32_t* finished = a.finished + s.head * int(a.runs + 1);
    const int shift = plan.run_shift, end = s.span + s.count;
    const auto run_of = [&](int span) { return shift == ONE_RUN_SHIFT ? 0 : span >> shift; };
    const int first_run = run_of(s.first), last_run = run_of(s.last);
    bool all = false;  // runs, once each is there
#pragma unroll 1
    for (int run = run_of(s.span); run << shift < end;) {
        int origin = run << shift, first = max(origin, s.first), last = min(origin + (1 << shift) - 1, s.last), to = first_run == last_run ? -1 : int(a.spans) + run;
        const int mine = min(last + 1, end) - max(first, s.span);
        if (!last_of(all ? finished : finished + 1 + run, all ? 1 : mine, all ? last_run - first_run + 1 : last - first + 1, told)) {
            if (first_run == last_run) return;
            all = false, ++run;
            continue;
        }
        if (all) origin = int(a.spans), first = origin + first_run, last = origin + last_run, to = -1;
        if (queries == 1) adder.template add_up<1>(wave, WAVES, origin, first, last, to);
        else if (wave / pieces < queries) adder.template add_up<4>(wave % pieces, pieces, origin, first, last, to);
        if (to < 0) return;
        all = true;
    }
}
