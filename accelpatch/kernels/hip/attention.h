// Attention of 1 to 8 new tokens a row over a static cache: what a launch is told, and how its work is cut.
//
// A span is 256 slots, counted from the first slot of a row's own tokens; a wave of a block has two of its tiles of 16. Of one head's
// spans 32 that follow each other are a run, where heads share a cached one, else all: whichever block finishes its last span adds it up,
// and whichever adds up the last run, all runs. So what a token gets depends on its slots alone.
#pragma once
#include "portability.h"

constexpr int TILE = 16, SPAN = 256, ROUNDS = SPAN / TILE / WAVES;
constexpr int RUN_SHIFT = 5, ONE_RUN_SHIFT = 30;  // log2 of a run's spans
constexpr int QUERIES = 8;         // of a block at once
constexpr int MOST_ROWS = 256;     // rows whose first slots fit in shared memory
constexpr int MASK_BYTES = TILE * 8;  // of a tile
constexpr int BROUGHT_PIECE = 4096;          // bytes that a thread asks for at once
constexpr int64_t BROUGHT_BYTES = 4 << 20;  // at most: what memory gives while a short cache is read
constexpr int TOPS = WAVES * 2 + 4;  // floats a query: of each wave the highest score and the sum of weights; its own slot's weight, three of padding
constexpr int RECORD_HEAD = 4;     // floats before the sums of a span or a run in memory: the highest score, the sum of weights, two of padding

// Floats between a wave's sums and the next one's, and between a query's and the next one's: sums of four queries that are
// stored at once lie in different banks.
template <int WIDE> constexpr int WAVE_STRIDE = WIDE + 4;
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
    float* sums;                  // [rows kv_heads tiles, QUERIES, spans + runs, RECORD_HEAD + size]
    int32_t* finished;            // [rows kv_heads tiles, runs + 1] zeros, and left so
    int32_t* hears;               // where the product before counts its columns of q and k (see GemvArgs), or null
    const void* following;        // what the kernel behind will read, or null
    int64_t following_bytes;
    int64_t hear_columns;         // q's and k's
    int64_t rows, tokens, capacity, heads, kv_heads, size, turned, window, spans, runs;
    float scaling, softcap, rope_scaling, epsilon;  // scaling: to the base 2; with a softcap see Softmax::keys
    int32_t plus_one, dependent;
};

// Where things lie in shared memory, in bytes.
struct AttentionPlan {
    int32_t group;           // heads that share a cached one
    int32_t run_shift;
    int32_t tiles, queries;  // of queries of a cached head; most queries of one
    int32_t buffers;         // of the waves' results: two, or one where memory is short
    int32_t starts_at, angles_at, queries_at, fresh_at, tops_at, states_at, ring_at, bytes;
};

// Facts of a launch that lie in device memory; no kernel of the step writes them, so they are read before grid_wait().
struct Geometry {
    int slot, stop, low, spans, heads;  // stop: after the new tokens; low: the first slot that any of them sees; heads: rows kv_heads tiles
    int* starts;                        // of the rows: where their spans are counted from
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
    DEVICE bool single() const { return first == last; }
};

// The slot of a wave's tile of a round, from the first of its span; whether any token sees something of it.
DEVICE int tile_at(int round) { return (round * WAVES + int(threadIdx.x) / WAVE) * TILE; }
DEVICE bool seen_tile(const Geometry& all, int slot) { return slot < all.stop && slot + TILE > all.low; }

// A block's share of all spans of all heads, a head's one after the other: of one head alone, where that makes no block's
// share much longer, since a second head is begun anew.
struct Share {
    int at, end;
    int before, busy;  // blocks that have spans: of those before this one, and in all
    DEVICE explicit Share(const Geometry& all) {
        const int blocks = int(gridDim.x), block = int(blockIdx.x), parts = blocks / all.heads, total = all.heads * all.spans;
        if (parts > 0 && (all.spans + parts - 1) / parts <= (total + blocks - 1) / blocks + 1) {
            const int head = min(block / parts, all.heads), part = block - head * parts, each = min(parts, all.spans);
            at = head * all.spans + (head < all.heads ? part * all.spans / parts : 0);
            end = head < all.heads ? head * all.spans + (part + 1) * all.spans / parts : at;
            before = head < all.heads ? head * each + part * each / parts : all.heads * each, busy = all.heads * each;
        } else {
            at = int(int64_t(total) * block / blocks), end = int(int64_t(total) * (block + 1) / blocks);
            before = min(at, block), busy = min(total, blocks);
        }
    }
    // The next segment that holds anything; false if there is none.
    DEVICE bool next(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        while (at < end) {
            s.head = at / all.spans;
            const int of = s.head / plan.tiles, skipped = at - s.head * all.spans, taken = min(end - at, all.spans - skipped);
            s.tile = s.head - of * plan.tiles, s.row = of / int(a.kv_heads), s.kv = of - s.row * int(a.kv_heads);
            const int start = all.starts[s.row];
            s.first = a.window > 0 ? max(all.low - start, 0) / SPAN : 0, s.last = (all.stop - 1 - start) / SPAN;
            s.span = s.first + skipped, s.count = min(taken, s.last + 1 - s.span);
            s.begin = start + s.span * SPAN;
            at += taken;
            if (s.count > 0) return true;
        }
        return false;
    }
};
