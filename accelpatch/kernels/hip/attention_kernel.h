// The kernel behind decode_attention. A block takes spans in turn; its waves keep a running softmax of their own tiles
// (each against its own highest score), and their results are added up through shared memory.
#pragma once
#include "attention_stage.h"
#include "attention_stream.h"

// What a lane's query may see of a segment.
template <class T, int WIDE> struct View {
    const HeadStager<T, WIDE>& stager;
    const Words4* query;  // of shared memory
    int own, least;       // the query's slot, and the one before the first that it sees
    bool windowed;
    DEVICE View(const AttentionArgs& a, const HeadStager<T, WIDE>& stager, const Geometry& all, const Segment& s) : stager(stager), windowed(a.window > 0) {
        const int q = min(AttentionTile<T>::query() & (QUERIES - 1), stager.queries(s) - 1);
        query = reinterpret_cast<const Words4*>(stager.query(q));
        own = all.slot + (s.tile * QUERIES + q) / int(a.heads / a.kv_heads), least = windowed ? own - int(a.window) : -1;
    }
};

// What a wave knows of up to 8 queries over its tiles of a span: the highest score, the sum of the lane's weights, and
// the weighted sum of values.
template <class T, int WIDE, int RING> struct Softmax {
    using Stream = CacheStream<T, WIDE, RING>;
    using Tile = AttentionTile<T>;
    static constexpr int SETS = Stream::SETS, STRIDE = WIDE + 4;  // floats of a query and wave in shared memory
    float top, total, sums[SETS][Tile::PARTS][4];

    // begin: of the span; end: of what is there of it.
    DEVICE void span(const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, const Geometry& all, int begin, int end, bool live) {
        float s[ROUNDS][4] = {};
        uint32_t given[ROUNDS] = {};
        if (live || Rehearsal::runs(1)) {
            given[0] = keys<0>(a, stream, view, all, begin + tile_at(0), end, s[0]);
            given[1] = keys<1>(a, stream, view, all, begin + tile_at(1), end, s[1]);
        }
        const auto larger = [](float v, float w) { return fmaxf(v, w); };
        top = larger(larger(larger(s[0][0], s[0][1]), larger(s[0][2], s[0][3])), larger(larger(s[1][0], s[1][1]), larger(s[1][2], s[1][3])));
        top = Tile::over_lanes(top, larger);
        const float base = top == -INFINITY ? 0.f : top;  // nothing was seen: all weights are zero
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][i] = fast_exp2(s[0][i] - base), s[1][i] = fast_exp2(s[1][i] - base);
        total = ((s[0][0] + s[0][1]) + (s[0][2] + s[0][3])) + ((s[1][0] + s[1][1]) + (s[1][2] + s[1][3]));
        for (auto& set : sums) for (auto& part : set) for (float& v : part) v = 0.f;
        if (!live && !Rehearsal::runs(2)) return;
        add_values<2>(stream, view, all, begin + tile_at(0), end, given[0], s[0]);
        add_values<3>(stream, view, all, begin + tile_at(1), end, given[1], s[1]);
    }
    // Scores to the base 2, and which of the slots are given: shown by the mask, or new, and in some token's window.
    template <int STAGE> DEVICE uint32_t keys(const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, const Geometry& all, int begin, int end, float* s) {
        const bool new_ones = begin + TILE > all.slot;
        uint32_t given = 0;
        Tile scores;
        scores.zero();
        stream.wait();
        if (seen_tile(all, begin, end)) {
            const int mine = begin + lane_id();
            given = lane_vote(lane_id() < TILE && mine >= all.low && (mine < all.slot ? (stream.mask(STAGE)[0] | stream.mask(STAGE)[1]) != 0 : mine < all.stop)) & 0xffffu;
#pragma unroll
            for (int step = 0; step < Stream::STEPS; ++step) {
                const int chunk = 4 * step + fragment_quarter();
                Words4 k[ROWS_PER_LANE];
#pragma unroll
                for (int h = 0; h < ROWS_PER_LANE; ++h) {
                    k[h] = *stream.piece(STAGE, h * Stream::STEPS + step);
                    if (new_ones) view.stager.replace(k[h], begin + fragment_row(h) - all.slot, 0, chunk);
                }
                scores.add_keys(view.query[chunk], k);
            }
        }
        stream.template after<STAGE>();
        // With a softcap a.scaling is 2 log2(e) / softcap times the scores' own: tanh(x) = 1 - 2 / (e^2x + 1).
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = scores.score(i) * a.scaling;
        if (a.softcap > 0.f)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = a.softcap * (1.f - 2.f / (fast_exp2(s[i]) + 1.f));
        if (new_ones || given != 0xffffu || view.windowed)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = begin + Tile::slot(i);
                if (!(given >> Tile::slot(i) & 1) || at > view.own || at <= view.least) s[i] = -INFINITY;
            }
        return given;
    }
    template <int STAGE> DEVICE void add_values(Stream& stream, const View<T, WIDE>& view, const Geometry& all, int begin, int end, uint32_t given, const float* s) {
        const uint32_t first = T::down_pair(s[0], s[1]), second = T::down_pair(s[2], s[3]);
        stream.wait();
        if (seen_tile(all, begin, end))
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                Words4 v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = *stream.piece(STAGE, set * 4 + i);
                if (given != 0xffffu || begin + TILE > all.slot)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (!(given >> Tile::slot(i) & 1)) v[i] = {0, 0, 0, 0};  // what hidden slots hold must not matter
                        if (const int chunk = Tile::chunk() + set * Tile::CHUNKS; chunk * 8 < WIDE) view.stager.replace(v[i], begin + Tile::slot(i) - all.slot, 1, chunk);
                    }
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part) Tile::add_values(sums[set][part], v, part, first, second);
            }
        stream.template after<STAGE>();
    }
    // Into shared memory: [query][wave].
    DEVICE void leave(float* states, float* tops, int queries) const {
        const int wave = threadIdx.x / WAVE;
        const float weights = Tile::over_lanes(total, [](float v, float w) { return v + w; });
        if (Tile::slot(0) == 0 && Tile::query() < queries) {
            float* at = tops + (Tile::query() * WAVES + wave) * 2;
            at[0] = top, at[1] = weights;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!Tile::owns() || Tile::cell_query(i) >= queries) continue;
            float* at = states + (Tile::cell_query(i) * WAVES + wave) * STRIDE;
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part)
                    if (const int column = set * Tile::CHUNKS * 8 + Tile::cell_column(part, i); column < WIDE) at[column] = sums[set][part][i];
        }
    }
};

// One query's results of all waves, and then of all spans, by one wave.
template <class T, int WIDE> struct Adder {
    static constexpr int STRIDE = WIDE + 4;
    const AttentionArgs& a;
    const Segment& s;
    int q;        // of the segment's queries
    uint16_t* y;  // of the query

    DEVICE Adder(const AttentionArgs& a, const Segment& s, int q) : a(a), s(s), q(q) {
        const int group = int(a.heads / a.kv_heads), of = s.tile * QUERIES + q, token = of / group, head = s.kv * group + of % group;
        y = static_cast<uint16_t*>(a.y) + ((s.row * a.tokens + token) * a.heads + head) * a.size;
    }
    DEVICE void store(int column, const float* sums, float total) const {
#pragma unroll
        for (int i = 0; i < 4; i += 2) *reinterpret_cast<uint32_t*>(y + column + i) = T::down_pair((sums[i] + 0.f) / total, (sums[i + 1] + 0.f) / total);
    }
    DEVICE float* record(int span) const { return a.sums + ((int64_t(s.head) * QUERIES + q) * a.spans + span) * (RECORD_HEAD + a.size); }
    DEVICE void add(const float* states, const float* tops, int span, bool live) const {
        float highest = -INFINITY, total = 0.f, factor[WAVES];
#pragma unroll
        for (int w = 0; w < WAVES; ++w) highest = fmaxf(highest, tops[2 * w]);
        const float base = highest == -INFINITY ? 0.f : highest;
#pragma unroll
        for (int w = 0; w < WAVES; ++w) factor[w] = fast_exp2(tops[2 * w] - base), total = fmaf(factor[w], tops[2 * w + 1], total);
        float* kept = record(span);
        for (int column = lane_id() * 4; column < int(a.size); column += WAVE * 4) {
            float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int w = 0; w < WAVES; ++w) {
                float one[4];
                load_floats<4>(one, states + w * STRIDE + column);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fmaf(factor[w], one[i], sums[i]);
            }
            if (!live) continue;
            if (s.single()) store(column, sums, total);
            else *reinterpret_cast<Words4*>(kept + RECORD_HEAD + column) = {float_to_bits(sums[0]), float_to_bits(sums[1]), float_to_bits(sums[2]), float_to_bits(sums[3])};
        }
        if (live && !s.single() && lane_id() == 0) kept[0] = highest, kept[1] = total;
    }
    // Once the segment's spans are in memory: whoever brings a head's last ones adds all of them up.
    DEVICE void count() const {
        int32_t* finished = a.finished + s.head * QUERIES + q;
        int before = 0;
        if (lane_id() == 0) before = atomicAdd(finished, s.count);
        if (!lane_vote(lane_id() == 0 && before + s.count == s.last - s.first + 1)) return;
        __threadfence();
        if (lane_id() == 0) *finished = 0;  // for the next launch
        float highest = -INFINITY;
        for (int span = s.first + lane_id(); span <= s.last; span += WAVE) highest = fmaxf(highest, bits_to_float(load_activation4(record(span))));
        for (int step = 1; step < WAVE; step *= 2) highest = fmaxf(highest, lane_xor(highest, step));
        for (int column = lane_id() * 4; column < int(a.size); column += WAVE * 4) {
            float total = 0.f, sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int span = s.first; span <= s.last; ++span) {
                const float* from = record(span);
                const Words4 head = load_activation16(from), one = load_activation16(from + RECORD_HEAD + column);
                const float factor = fast_exp2(bits_to_float(head.x) - highest);
                total = fmaf(factor, bits_to_float(head.y), total);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fmaf(factor, bits_to_float(word_of(one, i)), sums[i]);
            }
            store(column, sums, total);
        }
    }
};

// What the kernel behind will read comes into L2 by the blocks that have nothing to do, once the others have their queries.
// busy: blocks that have spans; before: of them, those before this one.
DEVICE void bring_following(const AttentionArgs& a, int before, int busy) {
    const int64_t idle = int64_t(gridDim.x) - busy, pieces = min(a.following_bytes, BROUGHT_BYTES) / BROUGHT_PIECE;
    if (idle <= 0) return;
    for (int64_t i = int64_t(blockIdx.x) - before + threadIdx.x * idle; i < pieces; i += THREADS * idle)
        prefetch_l2<BROUGHT_PIECE>(static_cast<const char*>(a.following) + i * BROUGHT_PIECE);
}

// RING: bytes of a block's ring.
template <class T, int WIDE, int RING> __global__ void __launch_bounds__(THREADS, WIDE > 128 ? 1 : BLOCKS_RESIDENT) attention_kernel(const AttentionArgs a, const AttentionPlan plan) {
    extern __shared__ __align__(128) char shared[];
    using Results = Softmax<T, WIDE, RING>;
    grid_release();
    const Geometry all(a, plan, shared);
    const int wave = threadIdx.x / WAVE;
    Share share(all);
    Segment s;
    if (!share.next(s, a, plan, all)) {  // stays until the kernel behind has found a place on every processor
        grid_wait();
        linger();
        bring_following(a, share.at, all.heads * all.spans);
        return;
    }
    for (int i = threadIdx.x; i < (plan.tops_at - plan.queries_at) / 4; i += THREADS) reinterpret_cast<uint32_t*>(shared + plan.queries_at)[i] = 0;
    CacheStream<T, WIDE, RING> stream(a, plan, all, shared);
    HeadStager<T, WIDE> stager{a, plan, shared};
    stager.turn_to(s.row);
    int turn = 0;
    for (bool live = !REHEARSES || a.dependent < 0;; live = true) {
        if (live) grid_wait();
        stream.held_up = !live;
        stager.stage(s, all, live);
        const View<T, WIDE> view(a, stager, all, s);
        const int queries = stager.queries(s);
#pragma unroll 1
        for (int i = 0; i < (live ? s.count : 1); ++i, ++turn) {
            Results results;
            results.span(a, stream, view, all, s.begin + i * SPAN, s.end, live);
            const int buffer = (plan.buffers - 1) & turn;
            float* tops = reinterpret_cast<float*>(shared + plan.tops_at) + buffer * plan.queries * WAVES * 2;
            float* states = reinterpret_cast<float*>(shared + plan.states_at) + buffer * plan.queries * WAVES * Results::STRIDE;
            if (live || Rehearsal::runs(3)) results.leave(states, tops, queries);
            if (live) __syncthreads();
            const int first = live ? (wave - turn) & (WAVES - 1) : Rehearsal::runs(3) ? 0 : queries;
            for (int q = first; q < queries; q += WAVES)  // by one wave a query, while the others go on
                Adder<T, WIDE>(a, s, q).add(states + q * WAVES * Results::STRIDE, tops + q * WAVES * 2, s.span + i, live);
            if (live && plan.buffers == 1) __syncthreads();
        }
        if (!live) {
            stager.head = -1;
            continue;
        }
        if (!s.single()) {
            __threadfence();
            __syncthreads();  // all waves' records are out
            if (wave < queries) Adder<T, WIDE>(a, s, wave).count();
        }
        if (!share.next(s, a, plan, all)) return;
    }
}
