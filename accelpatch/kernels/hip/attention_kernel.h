// The kernel behind decode_attention. It begins with q and k, where the product before signals them: all but the new
// token's own value is then added up while that product still makes v. A block takes KV splits in order; its warps keep
// a running softmax of their own tiles (each against its own highest score), and their results are added up through
// shared memory.
#pragma once
#include "attention_schedule.h"
#include "attention_stage.h"
#include "attention_sums.h"
#include "attention_stream.h"

// What a lane's queries may see of a segment.
template <class T, int WIDE> struct View {
    using Tile = AttentionTile<T>;
    const HeadStager<T, WIDE>& stager;
    const Words4* query;  // of shared memory: what the lane gives to products with keys
    int own[Tile::QUERIES_PER_LANE],
        least[Tile::QUERIES_PER_LANE];  // the queries' slots, and the ones before the first that they see
    bool windowed, several;             // new tokens, of which one may see another
    DEVICE View(const AttentionArgs& a, const HeadStager<T, WIDE>& stager, const Geometry& all, const Segment& s)
        : stager(stager),
          windowed(a.window > 0),
          several(a.tokens > 1) {
        const int last = stager.queries(s) - 1;
        query = reinterpret_cast<const Words4*>(stager.query(min(Tile::key_query() & (QUERIES - 1), last)));
#pragma unroll
        for (int n = 0; n < Tile::QUERIES_PER_LANE; ++n) {
            own[n] = all.slot + (s.tile * QUERIES + min(Tile::query(n) & (QUERIES - 1), last)) / stager.plan.group;
            least[n] = windowed ? own[n] - int(a.window) : -1;
        }
    }
};

// What a warp knows of up to 8 queries over its tiles of a KV split: of each of the lane's own the highest score and
// the sum of its weights, and the weighted sums of values. SOLE: there is but one query.
template <class T, int WIDE, int BUFFER_BYTES, bool ONCE, bool SOLE, class SCHEDULE> struct Softmax {
    using Stream = CacheStream<T, WIDE, BUFFER_BYTES, ONCE, SCHEDULE>;
    using Tile = AttentionTile<T>;
    static constexpr int SETS = Stream::SETS;
    static constexpr int OWN = SOLE ? 1 : Tile::QUERIES_PER_LANE;
    static DEVICE constexpr bool wanted(int i) { return Tile::which(i) < OWN; }  // whether a score is
    float top[OWN], total[OWN], sums[SETS][Tile::PARTS][4];
    float own[OWN];  // the weight of a query's own slot, whose value is added to all others by Adder; negative where
                     // another lane has it

    // begin: of the KV split.
    DEVICE void split(
        const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, const Geometry& all, int begin) {
        static_assert(ROUNDS == 2, "two tiles of keys, two of values");
        float s[ROUNDS][4] = {};
        const uint32_t shown = stream.given(begin), given[ROUNDS] = {shown & 0xffffu, shown >> TILE};
        keys<0>(a, stream, view, all, begin + tile_at(0), s[0], given[0]);
        keys<1>(a, stream, view, all, begin + tile_at(1), s[1], given[1]);
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const auto larger = [](float v, float w) { return fmaxf(v, w); };
            top[n] = -INFINITY, total[n] = 0.f, own[n] = -1.f;
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i)
                if (Tile::which(i % 4) == n) top[n] = larger(top[n], s[i / 4][i % 4]);
            top[n] = Tile::over_lanes(top[n], larger);
            const float base = top[n] == -INFINITY ? 0.f : top[n];  // nothing was seen: all weights are zero
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i)
                if (Tile::which(i % 4) == n) total[n] += s[i / 4][i % 4] = fast_exp2(s[i / 4][i % 4] - base);
        }
        if (begin + KV_SPLIT > all.slot)
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i) {
                const int n = Tile::which(i % 4);
                if (n < OWN && begin + tile_at(i / 4) + Tile::slot(i % 4) == view.own[n])
                    own[n] = s[i / 4][i % 4], s[i / 4][i % 4] = 0.f;
            }
        for (auto& set : sums)
            for (auto& part : set)
                for (float& v : part) v = 0.f;
        add_values<2>(stream, view, all, begin + tile_at(0), given[0], s[0]);
        add_values<3>(stream, view, all, begin + tile_at(1), given[1], s[1]);
    }
    // Scores to the base 2 of a tile, of whose slots some are given.
    template <int ROUND>
    DEVICE void keys(const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, const Geometry& all, int slot,
        float* s, uint32_t given) {
        Tile scores;
        scores.zero();
        stream.wait();
        if (seen_tile(all, slot)) {
            if (slot + TILE > all.slot) stream.template put_new<ROUND>(slot, view.stager);
            warp_sync();  // all lanes' copies have come
#pragma unroll
            for (int step = 0; step < Stream::STEPS; ++step) {
                const Words4 q = view.query[4 * step + fragment_quarter()];
                Words4 k[ROWS_PER_LANE];
#pragma unroll
                for (int h = 0; h < ROWS_PER_LANE; ++h) k[h] = stream.key(ROUND, h, step);
                scores.add_keys(q, k);
            }
            warp_sync();  // before others' places take new tiles
        }
        stream.template after<ROUND>();
        if (SHARED_STAGES && !seen_tile(all, slot)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = wanted(i) ? -INFINITY : 0.f;
            return;
        }
        // With a softcap a.scaling is 2 log2(e) / softcap times the scores' own: tanh(x) = 1 - 2 / (e^2x + 1).
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s[i] = wanted(i) ? rounded_multiply(scores.score(i), a.scaling) : 0.f;  // in each of the kernels alike
        if (a.softcap > 0.f)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = a.softcap * (1.f - 2.f * fast_reciprocal(fast_exp2(s[i]) + 1.f));
        if (slot + TILE > all.slot || given != 0xffffu || view.windowed)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = slot + Tile::slot(i);
                if (wanted(i) && (!(given >> Tile::slot(i) & 1) || at > view.own[Tile::which(i)] ||
                                     at <= view.least[Tile::which(i)]))
                    s[i] = -INFINITY;
            }
    }
    template <int STAGE>
    DEVICE void add_values(
        Stream& stream, const View<T, WIDE>& view, const Geometry& all, int slot, uint32_t given, const float* s) {
        const typename Tile::Weights weights = Tile::weights(s);
        stream.wait();
        if (seen_tile(all, slot)) {
            const bool new_ones = slot + TILE > all.slot;
            if (RARELY(~given & (new_ones ? (1u << max(all.slot - slot, 0)) - 1 : 0xffffu)))
                stream.template hide<STAGE>(given);
            if (RARELY(new_ones && view.several)) stream.template put_new<STAGE>(slot, view.stager);
            warp_sync();  // all lanes' copies have come
            const Words4* values = stream.values(STAGE);
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part)
                    Tile::add_values(sums[set][part], values, Stream::CHUNKS, set, part, weights);
            warp_sync();  // before others' places take new tiles
        }
        stream.template after<STAGE>();
    }
    // Into shared memory: [query][warp].
    DEVICE void leave(float* states, float* tops, int queries) const {
        const int warp = threadIdx.x / WARP_SIZE;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const float weights = Tile::over_lanes(total[n], [](float v, float w) { return v + w; });
            if (Tile::query(n) >= queries) continue;
            float* at = tops + Tile::query(n) * TOPS;
            if (Tile::slot(0) == 0) at[2 * warp] = top[n], at[2 * warp + 1] = weights;
            if (!(own[n] < 0.f)) at[2 * WARPS] = own[n];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!Tile::owns() || Tile::cell_query(i) >= queries) continue;
            float* at = states + Tile::cell_query(i) * QUERY_STRIDE<WIDE> + warp * WARP_STRIDE<WIDE>;
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part)
                    if (const int column = set * Tile::CHUNKS * 8 + Tile::cell_column(part, i); column < WIDE)
                        at[column] = sums[set][part][i];
        }
    }
};

// What the kernel behind will read comes into L2 by the blocks that have nothing to do, once the others have their
// queries. busy: blocks that have KV splits; before: of them, those before this one.
DEVICE void bring_following(const AttentionArgs& a, int before, int busy) {
    const int64_t idle = int64_t(gridDim.x) - busy, piece = int64_t(blockIdx.x) - before + threadIdx.x * idle;
    if (threadIdx.x < BROUGHT_PIECES && piece < a.following_bytes / BROUGHT_PIECE)
        prefetch_l2(static_cast<const char*>(a.following) + piece * BROUGHT_PIECE, BROUGHT_PIECE);
}

// The signal counts from zero again once all blocks have consumed it. One warp sees to it, while the others go on.
DEVICE void forget(const AttentionArgs& a, int warp) {
    if (a.consumer && int(threadIdx.x) == warp * WARP_SIZE && last_call(a.consumer + 1, int(gridDim.x)))
        a.consumer[0] = 0;
}

// What most launches ask for: heads that fill their columns, none of what some models have; and one new token a row
// with one tile of queries, or several tokens of a lone row, as prompt lookup has them. Kernels for that alone, with a
// cached head for each head (ONE) or for several, are a fifth to a third smaller, and leave products their room in the
// instruction cache. So do those of more rows than a LONE one, whose words may still be on their way; DYNAMIC ones are
// for rows of many KV splits.
enum Kind { ANY, ONE, SEVERAL, LONE_ONE, LONE_SEVERAL, LONE_TOKENS, DYNAMIC_ONE, DYNAMIC_SEVERAL };
template <Kind KIND>
constexpr bool SOLE_QUERY = KIND == ONE || KIND == LONE_ONE || KIND == DYNAMIC_ONE;  // of a cached head
constexpr Kind lone(Kind kind) { return kind == ONE ? LONE_ONE : LONE_SEVERAL; }
constexpr Kind dynamic(Kind kind) { return kind == ONE ? DYNAMIC_ONE : DYNAMIC_SEVERAL; }
template <int WIDE> Kind kind_of(const AttentionArgs& a) {
    if (a.size != WIDE || a.window || a.softcap > 0.f || a.q_norm || a.k_norm) return ANY;
    if (a.tokens > 1) return a.rows == 1 ? LONE_TOKENS : ANY;
    return a.heads > a.kv_heads * QUERIES ? ANY : a.heads == a.kv_heads ? ONE : SEVERAL;
}
template <Kind KIND, int WIDE> DEVICE AttentionArgs known(AttentionArgs a) {
    if (KIND != ANY) a.size = WIDE, a.window = 0, a.softcap = 0.f, a.q_norm = a.k_norm = nullptr;
    if (KIND == LONE_TOKENS) a.consumer = nullptr;  // signalled, but not waited for
    else if (KIND != ANY) a.tokens = 1;
    if (SOLE_QUERY<KIND>) a.kv_heads = a.heads;
    if (KIND == LONE_ONE || KIND == LONE_SEVERAL || KIND == LONE_TOKENS) a.rows = 1;
    return a;
}
template <Kind KIND> DEVICE AttentionPlan known(AttentionPlan plan) {
    if (KIND != ANY && KIND != LONE_TOKENS) plan.tiles = 1;
    if (SOLE_QUERY<KIND>) plan.group = plan.queries = 1;
    return plan;
}

// BUFFER_BYTES: bytes of a block's multi-stage buffer.
template <class T, int WIDE, int BUFFER_BYTES, Kind KIND>
__global__ void __launch_bounds__(THREADS, WIDE > 128 ? 1 : BLOCKS_RESIDENT)
    attention_kernel(const AttentionArgs given, const AttentionPlan laid_out) {
    const AttentionArgs a = known<KIND, WIDE>(given);
    const AttentionPlan plan = known<KIND>(laid_out);
    extern __shared__ __align__(128) char shared[];
    constexpr bool ONCE = KIND != ANY && KIND != LONE_TOKENS;  // one tile of queries
    constexpr bool DYNAMIC = KIND == DYNAMIC_ONE || KIND == DYNAMIC_SEVERAL;
    using Mine = typename ScheduleOf<DYNAMIC>::Type;
    using Results = Softmax<T, WIDE, BUFFER_BYTES, ONCE, SOLE_QUERY<KIND>, Mine>;
    static_assert(
        !DYNAMIC || Results::Stream::DEPTH <= 4, "the stream asks for an item no earlier than in the split behind it");
    grid_release();
    const Geometry all(a, plan, shared);
    const int warp = threadIdx.x / WARP_SIZE;
    const Mine all_work(all, a);  // goes through more than once: the stream is ahead
    Mine schedule = all_work;
    Segment s;
    if (!schedule.begin(s, a, plan, all)) {  // stays until the kernel behind has found a place on every SM
        grid_wait();
        forget(a, 0);
        linger();
        bring_following(a, schedule.before, schedule.busy);
        return;
    }
    typename Results::Stream stream(a, plan, all, FIRST_KNOWN ? schedule : all_work, s, shared);
    HeadStager<T, WIDE> stager{
        a, plan, shared, KIND != ONE && KIND != SEVERAL && !DYNAMIC && a.consumer && a.rows == 1};
    int iteration = 0;
    bool left = false, several = false;  // whether something is left to add up; whether there was more than one segment
    for (bool begun = false;; begun = true) {
        stager.switch_to(s.row);
        const View<T, WIDE> view(a, stager, all, s);
        const auto first = stager.task(s, all, warp);
        const typename HeadStager<T, WIDE>::Angles rotation(a, stager.angles(first.token));
        if (!a.consumer) {
            grid_wait();
        } else if (!begun) {
            if (threadIdx.x == 0) signal_wait(a.consumer, int(a.consumer_columns), a.rows > 1);
            __syncthreads();
        }
        stager.stage(s, all, first, rotation);
        const int queries = stager.queries(s);
#pragma unroll 1
        for (int i = 0; i < s.count; ++i, ++iteration) {
            if constexpr (DYNAMIC) all_work.follow(s, i, a, plan, all);
            Results results;
            const int begin = s.begin + i * KV_SPLIT;
            results.split(a, stream, view, all, begin);
            if (a.consumer && i + 1 == s.count) {  // the kernel before has to end at last
                grid_wait();
                if (begin + KV_SPLIT > all.slot && warp == WARPS - 1) stager.stage_value(s, all);
            }
            const int buffer = (plan.buffers - 1) & iteration;
            float* tops = reinterpret_cast<float*>(shared + plan.tops_at) + buffer * plan.queries * TOPS;
            float* states =
                reinterpret_cast<float*>(shared + plan.states_at) + buffer * plan.queries * QUERY_STRIDE<WIDE>;
            results.leave(states, tops, queries);
            const int q = (warp - iteration) & (WARPS - 1);  // a query's by one warp, while the others go on
            const Adder<T, WIDE> adder(a, plan, s, q);
            __syncthreads();
            if (!begun && i + 1 == s.count && q == WARPS - 1) forget(a, warp);
            const int own = all.slot + adder.token - begin;
            const bool here = own >= 0 && own < KV_SPLIT;
            float* subtrees =
                reinterpret_cast<float*>(shared + plan.level_sums_at) + q * (plan.levels * LEVEL_FLOATS<WIDE>);
            if (RARELY(BLOCKS_MEET && a.rows > 1 && q < queries && i == 0 && s.second_of_pair(plan.levels)))
                adder.go_on(subtrees);
            if (q < queries)
                adder.add(states + q * QUERY_STRIDE<WIDE>, tops + q * TOPS, s.split + i,
                    here ? stager.value(adder.token) : nullptr, own / TILE & (WARPS - 1), subtrees, plan.levels);
            if (plan.buffers == 1) __syncthreads();
        }
        const bool alone = s.alone(plan.levels);
        if (!BLOCKS_MEET && !alone &&
            last_of(a.finished + s.head, s.count, s.last + 1 - s.first, reinterpret_cast<int*>(shared + plan.tops_at)))
            add_splits<T, WIDE>(a, s, plan, queries, 0, 1, true, warp);
        left = left || !alone;
        if (!schedule.next(s, a, plan, all)) break;
        several = true;
        __syncthreads();  // what lies staged has been read, and last_of's word
    }
    if constexpr (DYNAMIC)
        if (all_work.items) {
            if (all_work.gathers(s, a, plan, all))
                add_splits<T, WIDE>(a, s, plan, stager.queries(s), all_work.part, all_work.parts, true, warp);
            return;
        }
    if (!BLOCKS_MEET || !left) return;
    // All that the block has to bring is on its way; so is what the others have.
    int place = warp - (iteration - 1) - stager.queries(s);  // those that have added nothing up last come first
    Mine again = schedule;
    if (several) again = all_work, again.next(s, a, plan, all);
    do {
        if (s.alone(plan.levels)) continue;
        int which, many;
        again.company(s, all, which, many);
        add_splits<T, WIDE>(a, s, plan, stager.queries(s), which, many, again.halves(all), place & (WARPS - 1));
        place -= (stager.queries(s) * (WIDE / PIECE) + many - 1) / many;  // other warps come to the next head
    } while (again.next(s, a, plan, all));
}
