// A warp's softmax over its tiles of a KV split, for up to 8 queries at once.
#pragma once
#include "attention_stage.h"
#include "attention_stream.h"

// Which slots of a segment each of a lane's queries may see.
template <class T, int WIDE> struct View {
    using Tile = CacheTile<T>;
    const HeadStager<T, WIDE>& stager;
    const Words4* query;  // in shared memory: the lane's operands of products with keys
    // own: the slots of the queries; least: the slot before the first that each sees.
    int own[Tile::QUERIES_PER_LANE], least[Tile::QUERIES_PER_LANE];
    int slot;                                    // the slot of the row's first new token
    bool windowed, several;                      // several: there are several new tokens, of which one may see another
    const float* scale[Tile::QUERIES_PER_LANE];  // the queries' scales, where they have any; staged after this is made
    DEVICE float query_scale(int which) const { return QueryForm<T>::SCALED ? *scale[which] : 1.f; }
    DEVICE View(const AttentionArgs& a, const HeadStager<T, WIDE>& stager, const Segment& s)
        : stager(stager),
          slot(s.slot),
          windowed(a.window > 0),
          several(a.tokens > 1) {
        const int last = stager.queries(s) - 1;
        query = reinterpret_cast<const Words4*>(stager.query(min(Tile::key_query() & (QUERIES - 1), last)));
#pragma unroll
        for (int n = 0; n < Tile::QUERIES_PER_LANE; ++n) {
            const int q = min(Tile::query(n) & (QUERIES - 1), last);
            own[n] = slot + (s.tile * QUERIES + q) / stager.plan.group;
            if (QueryForm<T>::SCALED) scale[n] = stager.query_scale(q);
            least[n] = windowed ? own[n] - int(a.window) : -1;
        }
    }
};

// A warp's partial softmax state of up to 8 queries over its tiles of a KV split: the highest score and the sum of
// weights of each of the lane's queries, and the weighted sums of values. SOLE: there is only one query.
template <class T, int WIDE, int BUFFER_BYTES, bool ONCE, bool SOLE, class SCHEDULE> struct Softmax {
    using Stream = CacheStream<T, WIDE, BUFFER_BYTES, ONCE, SCHEDULE>;
    using Tile = CacheTile<T>;
    using Values = ValueMma<T, Stream::SETS, SOLE>;
    static constexpr int SETS = Stream::SETS;
    static constexpr int OWN = SOLE ? 1 : Tile::QUERIES_PER_LANE;
    // Whether score i belongs to one of the lane's queries.
    static DEVICE constexpr bool wanted(int i) { return Tile::query_index(i) < OWN; }
    float top[OWN], total[OWN], sums[SETS][Tile::PARTS][4];
    // The weight of a query's own slot, whose value Adder adds; negative where another lane has it.
    float own[OWN];

    // Computes the state over a KV split, which begins at slot `begin`. Precondition: all lanes of the warp call it.
    DEVICE void split(const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, int begin) {
        static_assert(ROUNDS == 2, "two tiles of keys, two of values");
        float s[ROUNDS][4] = {};
        const uint32_t shown = stream.given(begin, view.slot, view.stager),
                       given[ROUNDS] = {shown & 0xffffu, shown >> TILE};
        const SlotScales scales(stream);
        keys<0>(a, stream, view, begin + tile_at(0), s[0], given[0], scales);
        keys<1>(a, stream, view, begin + tile_at(1), s[1], given[1], scales);
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const auto larger = [](float v, float w) { return fmaxf(v, w); };
            top[n] = -INFINITY, total[n] = 0.f, own[n] = -1.f;
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i)
                if (Tile::query_index(i % 4) == n) top[n] = larger(top[n], s[i / 4][i % 4]);
            top[n] = Tile::reduce_lanes(top[n], larger);
            const float base = top[n] == -INFINITY ? 0.f : top[n];  // no visible slot: all weights are zero
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i)
                if (Tile::query_index(i % 4) == n) total[n] += s[i / 4][i % 4] = fast_exp2(s[i / 4][i % 4] - base);
        }
        if (begin + KV_SPLIT > view.slot)
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i) {
                const int n = Tile::query_index(i % 4);
                if (n < OWN && begin + tile_at(i / 4) + Tile::slot(i % 4) == view.own[n])
                    own[n] = s[i / 4][i % 4], s[i / 4][i % 4] = 0.f;
            }
        Values values(sums);
        if constexpr (CODED<T>)
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i)
                if (wanted(i % 4)) s[i / 4][i % 4] = rounded_multiply(s[i / 4][i % 4], scales.value(i / 4, i % 4));
        values.scale(s);
        add_values<2>(a, stream, view, begin + tile_at(0), given[0], s[0], values);
        add_values<3>(a, stream, view, begin + tile_at(1), given[1], s[1], values);
        values.finish();
    }
    // For caches of codes: the scales of the keys and values of a lane's slots.
    struct SlotScales {
        uint32_t both[ROUNDS][4];
        DEVICE explicit SlotScales(const Stream& stream) {  // all lanes call it
            if constexpr (CODED<T>)
#pragma unroll
                for (int i = 0; i < 4 * ROUNDS; ++i)
                    if (const int first = Tile::first_of_slot(i % 4); first == i % 4)
                        both[i / 4][first] = stream.scales_of(i / 4, first);
        }
        DEVICE float key(int round, int i) const { return Bf16::up(both[round][Tile::first_of_slot(i)]); }
        DEVICE float value(int round, int i) const { return Bf16::up_high(both[round][Tile::first_of_slot(i)]); }
    };
    // The scores of a tile, in units of log2. given: a bit for each slot that is visible.
    template <int ROUND>
    DEVICE void keys(const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, int slot, float* s,
        uint32_t given, const SlotScales& scales) {
        KeyMma<T, WIDE, SOLE> scores;
        scores.zero();
        stream.wait();
        if (seen_tile(a, view.slot, slot)) {
            if (slot + TILE > view.slot) stream.template put_new<ROUND>(slot, view.slot, view.stager);
            warp_sync();  // all lanes' copies have arrived
#pragma unroll
            for (int i = 0; i < Stream::KEY_PIECES; ++i) {
                const auto q = scores.query(view.query, Stream::query_chunk(i));
                Words4 k[ROWS_PER_LANE];
#pragma unroll
                for (int h = 0; h < ROWS_PER_LANE; ++h) k[h] = stream.key(ROUND, h, i);
                scores.add(q, k);
            }
            warp_sync();  // all lanes have read the tile that after() overwrites
        }
        stream.template after<ROUND>();
        if (SHARED_STAGES && !seen_tile(a, view.slot, slot)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = wanted(i) ? -INFINITY : 0.f;
            return;
        }
        // With a softcap a.scaling is 2 log2(e) / softcap times the scores' own: tanh(x) = 1 - 2 / (e^2x + 1).
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!wanted(i)) continue;
            s[i] = rounded_multiply(scores.score(i), a.scaling);  // rounded alone: the same bits in all kernels
            if constexpr (CODED<T>)
                s[i] = rounded_multiply(
                    s[i], rounded_multiply(scales.key(ROUND, i), view.query_scale(Tile::query_index(i))));
        }
        if (a.softcap > 0.f)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = a.softcap * (1.f - 2.f * fast_reciprocal(fast_exp2(s[i]) + 1.f));
        if (slot + TILE > view.slot || given != 0xffffu || view.windowed)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = slot + Tile::slot(i);
                if (wanted(i) && (!(given >> Tile::slot(i) & 1) || at > view.own[Tile::query_index(i)] ||
                                     at <= view.least[Tile::query_index(i)]))
                    s[i] = -INFINITY;
            }
    }
    template <int STAGE>
    DEVICE void add_values(const AttentionArgs& a, Stream& stream, const View<T, WIDE>& view, int slot, uint32_t given,
        const float* s, Values& value_mma) {
        const typename Values::Weights weights = value_mma.weights(s);
        stream.wait();
        if (seen_tile(a, view.slot, slot)) {
            const bool new_ones = slot + TILE > view.slot;
            if (RARELY(!CODED<T> && ~given & (new_ones ? (1u << max(view.slot - slot, 0)) - 1 : 0xffffu)))
                stream.template hide<STAGE>(given);
            if (RARELY(new_ones && view.several)) stream.template put_new<STAGE>(slot, view.slot, view.stager);
            warp_sync();  // all lanes' copies have arrived
            value_mma.add(stream.values(STAGE), Stream::CHUNKS, weights);
            warp_sync();  // all lanes have read the tile that after() overwrites
        }
        stream.template after<STAGE>();
    }
    // Stores the state in shared memory, [query][warp]. A barrier must follow before others read it.
    DEVICE void leave(float* states, float* tops, int queries) const {
        const int warp = threadIdx.x / WARP_SIZE;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const float weights = Tile::reduce_lanes(total[n], [](float v, float w) { return v + w; });
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
