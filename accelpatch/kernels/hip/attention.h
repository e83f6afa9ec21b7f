// Attention of 1 to 8 new tokens a row over a static cache: the arguments of a launch, and how its work is cut.
//
// A span is 256 slots, counted from the first slot of a row's own tokens; a wave of a block has two of its tiles of 16. Spans of one head
// are added up as a tree that their numbers alone give (attention_records.h): so what a token gets depends on its slots alone.
#pragma once
#include "portability.h"

constexpr int TILE = 16, SPAN = 256, ROUNDS = SPAN / TILE / WAVES;
constexpr int QUERIES = 8;         // of a block at once
constexpr int MOST_ROWS = 256;     // rows whose first slots fit in shared memory
constexpr int BROUGHT_PIECE = 4096, BROUGHT_PIECES = 4;  // of what the kernel behind reads: bytes that a thread asks for, and so many threads of a block; more is slower
constexpr int TOPS = WAVES * 2 + 4;  // floats a query: of each wave the highest score and the sum of weights; its own slot's weight, three of padding
constexpr int NODE = 8;    // spans whose results are added up by themselves, and then so many such results
constexpr int NODE_LEVELS = 3, LEVELS = 6;  // of a node's tree, and of a bunch's, of NODE NODE spans
constexpr int PIECE = 16, RECORD_HEAD = 4;  // columns of a record's piece, and the words before them: the highest score, the sum of weights, how many spans, one of padding
constexpr int PIECE_FLOATS = RECORD_HEAD + PIECE;

// Floats between a wave's sums and the next one's, and between a query's and the next one's: sums of four queries that are
// stored at once lie in different banks.
template <int WIDE> constexpr int WAVE_STRIDE = WIDE + 4;
template <int WIDE> constexpr int NODE_FLOATS = WIDE + 4;  // of a query's result that waits for the next one
template <int WIDE> constexpr int QUERY_STRIDE = WAVES * WAVE_STRIDE<WIDE> + 4;

// Sizes in elements. qkv[rows tokens, (heads + 2 kv_heads) size]; keys, values[rows, kv_heads, capacity, size];
// mask[rows, capacity]; positions[rows, tokens]; inv_freq[turned / 2].
struct AttentionArgs {
    const void* qkv;
    const int64_t *positions, *slot, *mask;
    void *keys, *values;
    const float* inv_freq;
    const void *q_norm, *k_norm;  // [size] or null
    void* y;                      // [rows tokens, heads size]
    float* records;               // [rows kv_heads tiles, queries, spans, PIECE_FLOATS for each 16 of 64, 128 or 256 columns] zeros, and left so
    int32_t* finished;            // [rows kv_heads tiles] zeros, and left so; the first numbers what blocks claim
    int32_t* consumer;               // where the product before counts its columns of q and k (see GemvArgs), or null
    const void* following;        // what the kernel behind will read, or null
    int64_t following_bytes;
    int64_t consumer_columns;         // q's and k's
    int64_t rows, tokens, capacity, heads, kv_heads, size, turned, window, spans;
    float scaling, softcap, rope_scaling, epsilon;  // scaling: to the base 2; with a softcap see Softmax::keys
    int32_t plus_one, dependent;
};

// Where things lie in shared memory, in bytes.
struct AttentionPlan {
    int32_t group;           // heads that share a cached one
    int32_t tiles, queries;  // of queries of a cached head; most queries of one
    int32_t buffers;         // of the waves' results: two, or one where memory is short
    int32_t levels;          // of the spans' tree whose results have a place
    int32_t starts_at, angles_at, queries_at, fresh_at, tops_at, states_at, nodes_at, ring_at, bytes;
};

// Facts of a launch that lie in device memory; no kernel of the step writes them, so they are read before grid_wait().
struct Geometry {
    int slot, stop, low, spans, heads;  // stop: after the new tokens; low: the first slot that any of them sees; heads: rows kv_heads tiles
    int* starts;                        // of the rows: where their spans are counted from; behind them a block's claim (attention_claims.h)
    DEVICE Geometry(const AttentionArgs& a, const AttentionPlan& plan, char* shared) : starts(reinterpret_cast<int*>(shared + plan.starts_at)) {
        slot = int(a.slot[0]), stop = slot + int(a.tokens);
        low = a.window > 0 ? max(slot + 1 - int(a.window), 0) : 0;
        heads = int(a.rows * a.kv_heads) * plan.tiles;
        spans = (stop - 1) / SPAN + 1;
        if (a.window > 0) spans = min(spans, (stop - low) / SPAN + 2);
        find_starts(a);
    }
    // The first slot of a row's own tokens, if positions count from there and all before it is hidden; else zero.
    DEVICE void find_starts(const AttentionArgs& a) {
        for (int row = threadIdx.x / WAVE; row < int(a.rows); row += WAVES) {
            int own = slot - int(a.positions[row * a.tokens]);
            if (own < 0 || own > slot) own = 0;
            int seen = 0;
            for (int s = lane_id(); s < own; s += WAVE) seen |= a.mask[row * a.capacity + s] != 0;
            for (int step = 1; step < WAVE; step *= 2) seen |= lane_xor(seen, step);
            if (lane_id() == 0) starts[row] = seen ? 0 : own;
        }
        __syncthreads();
    }
};

// Spans of one head that follow each other: what a block takes at a time.
struct Segment {
    int row, kv, tile, head;  // tile: of queries
    int first, last;          // of the head's spans that any token sees
    int span, count;          // the first that is taken, and how many
    int begin;                // their first slot
    bool paired;              // at most two blocks have all, of which the second can go on with the first one's sums
    DEVICE bool single() const { return first == last; }
    DEVICE bool ends() const { return span + count > last; }  // whether the head's last span is among them
    // Whether blocks need not gather what they have: one, or one after the other, adds up all in its own tree, of 1 << levels spans.
    DEVICE bool alone(int levels) const { return single() || ((paired || (span == first && ends())) && first >> levels == last >> levels); }
    // How many spans it adds up at most: as readers of records expect, where others have to be added to them.
    DEVICE int most(int levels) const { return alone(levels) ? 1 << levels : min(1 << levels, NODE); }
    // Of such a pair, whether it is the first; whether the second, and does go on.
    DEVICE bool hands_on() const { return paired && !ends(); }
    DEVICE bool goes_on(int levels) const { return paired && span > first && alone(levels); }
};

// The slot of a wave's tile of a round, from the first of its span; whether any token sees something of it.
DEVICE int tile_at(int round) { return (round * WAVES + int(threadIdx.x) / WAVE) * TILE; }
DEVICE bool seen_tile(const Geometry& all, int slot) { return slot < all.stop && slot + TILE > all.low; }

// A block's share of all spans of all heads, a head's one after the other: of one head alone, where that makes no block's
// share much longer, since a second head is begun anew. The last head comes first: what of it another block goes on with, as
// its last one, is then added up in time, as a rule.
struct Share {
    int at, end;
    int before, busy;  // blocks that have spans: of those before this one, and in all
    int part = 0, parts;  // of a head, where a block has spans of one alone; else no parts
    DEVICE Share(const Geometry& all, const AttentionArgs&) {
        const int blocks = int(gridDim.x), block = int(blockIdx.x), total = all.heads * all.spans;
        parts = blocks / all.heads;
        if (parts > 0 && (all.spans + parts - 1) / parts <= (total + blocks - 1) / blocks + 1) {
            const int head = min(block / parts, all.heads), each = min(parts, all.spans);
            part = block - head * parts;
            at = head * all.spans + (head < all.heads ? part * all.spans / parts : 0);
            end = head < all.heads ? head * all.spans + (part + 1) * all.spans / parts : at;
            before = head < all.heads ? head * each + part * each / parts : all.heads * each, busy = all.heads * each;
        } else {
            parts = 0;
            at = int(int64_t(total) * block / blocks), end = int(int64_t(total) * (block + 1) / blocks);
            before = min(at, block), busy = min(total, blocks);
        }
    }
    // Which block has a span, of all heads', where shares are not of one head. A float's quotient is off by one at most.
    static DEVICE int block_of(int span, const Geometry& all) {
        const int64_t of = (span + int64_t(1)) * int(gridDim.x) - 1, total = all.heads * all.spans;
        int block = int(float(of) / float(total));
        if (block * total > of) --block;
        if ((block + 1) * total <= of) ++block;
        return block;
    }
    // Of the blocks that have spans of a segment's head, which this one is and how many there are.
    DEVICE void company(const Segment& s, const Geometry& all, int& which, int& many) const {
        const int count = s.last + 1 - s.first;
        if (parts > all.spans) {
            which = s.span - s.first, many = count;
        } else if (parts > 0) {
            which = part, many = min((count * parts + all.spans - 1) / all.spans, parts);
        } else {
            const int begin = s.head * all.spans, first = block_of(begin, all);
            which = int(blockIdx.x) - first, many = block_of(begin + count - 1, all) - first + 1;
        }
    }
    // Whether blocks have at least half a node's spans of a head, as a rule.
    DEVICE bool halves(const Geometry& all) const { return (parts > 0 ? all.spans / parts : all.heads * all.spans / int(gridDim.x)) >= NODE / 2; }
    // The next segment that holds anything; false, and s stays, if there is none.
    DEVICE bool next(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        while (at < end) {
            Segment n;
            n.head = (end - 1) / all.spans;
            const int of = n.head / plan.tiles, skipped = max(at - n.head * all.spans, 0), taken = end - n.head * all.spans - skipped;
            n.tile = n.head - of * plan.tiles, n.row = of / int(a.kv_heads), n.kv = of - n.row * int(a.kv_heads);
            const int start = all.starts[n.row];
            n.first = a.window > 0 ? max(all.low - start, 0) / SPAN : 0, n.last = (all.stop - 1 - start) / SPAN;
            n.span = n.first + skipped, n.count = min(taken, n.last + 1 - n.span);
            n.begin = start + n.span * SPAN;
            n.paired = BLOCKS_MEET && a.rows > 1 && parts == 0 && all.heads >= int(gridDim.x);
            end -= taken;
            if (n.count > 0) return s = n, true;
        }
        return false;
    }
    DEVICE bool more() const { return at < end; }  // whether next() has something to look at
    // The first; of a ClaimingShare it may have to be claimed.
    DEVICE bool begin(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) { return next(s, a, plan, all); }
};
