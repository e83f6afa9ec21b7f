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
    float* records;  // of its spans

    DEVICE Adder(const AttentionArgs& a, const Segment& s, int group, int q) : a(a), s(s), token(a.tokens == 1 ? 0 : (s.tile * QUERIES + q) / group) {
        const int of = s.tile * QUERIES + q, head = s.kv * group + of - token * group;
        y = static_cast<uint16_t*>(a.y) + int64_t((s.row * int(a.tokens) + token) * int(a.heads) + head) * int(a.size);
        records = a.sums + int64_t(s.head * QUERIES + q) * (int(a.spans) * (RECORD_HEAD + int(a.size)));
    }
    DEVICE void store(int column, const float* sums, float total) const {
        const float share = fast_reciprocal(total);
#pragma unroll
        for (int i = 0; i < 4; i += 2) *reinterpret_cast<uint32_t*>(y + column + i) = T::down_pair((sums[i] + 0.f) * share, (sums[i + 1] + 0.f) * share);
    }
    DEVICE float* record(int span) const { return records + span * (RECORD_HEAD + int(a.size)); }
    // value: of the query's own slot, which wave `owner` has seen; null where that is not in the span.
    DEVICE void add(const float* states, const float* tops, int span, const uint16_t* value, int owner) const {
        constexpr int RUN = WAVE * 4, RUNS = (WIDE + RUN - 1) / RUN;  // columns of all lanes; how often
        float one[RUNS][WAVES][4], known[2 * WAVES];  // all are under way before the first is needed
#pragma unroll
        for (int w = 0; w < WAVES; w += 2) load_floats<4>(known + 2 * w, tops + 2 * w);
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
#pragma unroll
            for (int w = 0; w < WAVES; ++w) load_floats<4>(one[run][w], states + w * WAVE_STRIDE<WIDE> + min(lane_id() * 4 + run * RUN, WIDE - 4));
        float highest = -INFINITY, total = 0.f, factor[WAVES];
#pragma unroll
        for (int w = 0; w < WAVES; ++w) highest = fmaxf(highest, known[2 * w]);
        const float base = highest == -INFINITY ? 0.f : highest;
#pragma unroll
        for (int w = 0; w < WAVES; ++w) factor[w] = fast_exp2(known[2 * w] - base), total = fmaf(factor[w], known[2 * w + 1], total);
        const float own = value ? tops[2 * WAVES] * fast_exp2(tops[2 * owner] - base) : 0.f;
        float* kept = record(span);
        if (!s.single() && lane_id() == 0) kept[0] = highest, kept[1] = total;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fmaf(factor[w], one[run][w][i], sums[i]);
            const int column = lane_id() * 4 + run * RUN;
            if (value && column < int(a.size))
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fmaf(own, T::up(value[column + i]), sums[i]);
            if (column >= int(a.size)) continue;
            else if (s.single()) store(column, sums, total);
            else *reinterpret_cast<Words4*>(kept + RECORD_HEAD + column) = {float_to_bits(sums[0]), float_to_bits(sums[1]), float_to_bits(sums[2]), float_to_bits(sums[3])};
        }
    }
    // Of all spans of the head, those columns that are the wave's: every `pieces`th run of four lanes' columns. Four lanes have
    // every GROUPSth span, counted from span 0 and not from the first that is seen: in longer company that is another one.
    template <int RUNS> DEVICE void add_up(int piece, int pieces) const {  // RUNS: at once
        constexpr int RUN = 16, GROUPS = WAVE / 4;  // columns of four lanes
        const int group = lane_id() / 4, column = lane_id() % 4 * 4, size = int(a.size);
#pragma unroll 1
        for (int run = piece; run * RUN < size; run += RUNS * pieces) {
            float highest = -INFINITY, total = 0.f, sums[RUNS][4] = {};
#pragma unroll(SHARED_RING ? 2 : 1)
            for (int span = s.first + ((group - s.first) & (GROUPS - 1)); span <= s.last; span += GROUPS) {
                const float* from = record(span);
                const Words4 head = load_activation16(from);
                Words4 one[RUNS];
#pragma unroll
                for (int i = 0; i < RUNS; ++i) {
                    const int at = (run + i * pieces) * RUN + column;
                    one[i] = {0, 0, 0, 0};
                    if (at < size) one[i] = load_activation16(from + RECORD_HEAD + at);
                }
                const float before = rebase(highest, bits_to_float(head.x)), factor = fast_exp2(bits_to_float(head.x) - highest);
                total = fmaf(factor, bits_to_float(head.y), total * before);
#pragma unroll
                for (int i = 0; i < RUNS; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(factor, bits_to_float(word_of(one[i], j)), sums[i][j] * before);
            }
#pragma unroll
            for (int step = 4; step < WAVE; step *= 2) {
                const float other = lane_xor(highest, step), before = rebase(highest, other), factor = fast_exp2(other - highest);
                total = fmaf(factor, lane_xor(total, step), total * before);
#pragma unroll
                for (int i = 0; i < RUNS; ++i)
                    if ((run + i * pieces) * RUN < size)
#pragma unroll
                        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(factor, lane_xor(sums[i][j], step), sums[i][j] * before);
            }
#pragma unroll
            for (int i = 0; i < RUNS; ++i)
                if (const int at = (run + i * pieces) * RUN + column; group == 0 && at < size) store(at, sums[i], total);
        }
    }
    // `highest` takes in another score; the factor of what counted against it before. A number it stays, whatever it meets.
    static DEVICE float rebase(float& highest, float other) {
        const float before = highest;
        highest = fmaxf(fmaxf(highest, other), LEAST);
        return fast_exp2(before - highest);
    }
};

// Whether this block brings the last of a head's spans; the others' are then in memory. Every thread calls it. told: a word
// of shared memory that nobody else uses between the barriers around it.
DEVICE bool last_of(const AttentionArgs& a, const Segment& s, volatile int* told) {
    __syncthreads();  // all waves' records are out
    if (threadIdx.x == 0) {
        int32_t* finished = a.finished + s.head;
        const bool last = count_up(finished, s.count) + s.count == s.last - s.first + 1;
        if (last) *finished = 0;  // for the next launch
        *told = last;
    }
    __syncthreads();
    return *told;
}

// The sums of a head's spans by all waves: one or more a query.
template <class T, int WIDE> DEVICE void add_spans(const AttentionArgs& a, const Segment& s, int group, int queries) {
    const int wave = threadIdx.x / WAVE, pieces = queries == 1 ? WAVES : queries == 2 ? WAVES / 2 : queries <= 4 ? WAVES / 4 : WAVES / 8;
    const Adder<T, WIDE> adder(a, s, group, wave / pieces);
    if (queries == 1) adder.template add_up<1>(wave, WAVES);
    else if (wave / pieces < queries) adder.template add_up<4>(wave % pieces, pieces);
}
