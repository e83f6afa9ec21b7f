// Attention of 1 to 8 new tokens a row over a static cache: the arguments of a launch, and how its work is partitioned.
//
// A KV split is 256 slots, counted from the first slot of a row's own tokens; a warp of a block has two of its tiles
// of 16. The KV splits of a head are reduced as a tree that depends on their numbers alone (attention_partials.h), so
// that a token's result depends on its slots alone.
#pragma once
#include "attention_codes.h"

constexpr int TILE = 16, KV_SPLIT = 256, ROUNDS = KV_SPLIT / TILE / WARPS;
constexpr int QUERIES = 8;      // that a block computes at once
constexpr int MOST_ROWS = 256;  // rows whose first slots fit in shared memory
// Prefetch of what the next kernel reads: bytes a thread, and threads of a block that prefetch; more was slower.
constexpr int BROUGHT_PIECE = 4096, BROUGHT_PIECES = 4;
// Floats of a query: the highest score and the sum of weights of each warp, the weight of its own slot, three of
// padding.
constexpr int TOPS = WARPS * 2 + 4;
constexpr int FAN_IN = 8;                     // KV splits of a subtree, and subtrees of a tree
constexpr int FAN_IN_LEVELS = 3, LEVELS = 6;  // levels of a subtree, and of a tree of FAN_IN * FAN_IN KV splits
// Columns of a piece of a partial state, and the words before them: the highest score, the sum of weights, the number
// of KV splits, one of padding.
constexpr int PIECE = 16, PARTIAL_HEAD = 4;
constexpr int PIECE_FLOATS = PARTIAL_HEAD + PIECE;

// Floats from one warp's sums to the next one's, and from one query's to the next one's, such that the sums of four
// queries, which are stored at once, are in different banks.
template <int WIDE> constexpr int WARP_STRIDE = WIDE + 4;
template <int WIDE> constexpr int LEVEL_FLOATS = WIDE + 4;  // of a query's state that waits for the next KV split's
template <int WIDE> constexpr int QUERY_STRIDE = WARPS * WARP_STRIDE<WIDE> + 4;

// Sizes in elements. qkv[rows tokens, (heads + 2 kv_heads) size]; keys, values[rows, kv_heads, capacity, size], of the
// same dtype or codes of 8 bits; then also key_scales, value_scales[rows, kv_heads, capacity], bf16;
// slot[rows]; mask[rows, capacity];
// positions[rows, tokens]; inv_freq[rotated / 2].
struct AttentionArgs {
    const void* qkv;
    const int64_t *positions, *slot, *mask;
    void *keys, *values;
    const float* inv_freq;
    const void *q_norm, *k_norm;  // [size] or null
    void* y;                      // [rows tokens, heads size]
    // [rows kv_heads tiles, queries, KV splits, PIECE_FLOATS for each 16 of 64, 128 or 256 columns]: zeros before and
    // after
    float* partials;
    int32_t* finished;  // [rows kv_heads tiles]: zeros before and after; the first counts the items that blocks fetch
    int32_t* consumer;  // where the linear layer before counts finished columns of q and k (see GemvArgs), or null
    const void* following;                // what the next kernel will read, or null
    uint16_t *key_scales, *value_scales;  // or null
    const float* sinks;                   // [heads]: scores without a key; or null
    int64_t following_bytes;
    int64_t consumer_columns;  // q's and k's
    int64_t rows, tokens, capacity, heads, kv_heads, size, rotary_dim, window, splits;
    float scaling, softcap, rope_scaling, epsilon;  // scaling: to the base 2; with a softcap see Softmax::keys
    int32_t plus_one, dependent;
};

// The layout of shared memory, in bytes, and sizes that the host computes.
struct AttentionPlan {
    int32_t group;           // query heads that share a cached head
    int32_t tiles, queries;  // tiles of queries of a cached head; most queries of a tile
    int32_t buffers;         // for the warps' states: two, or one where memory is short
    int32_t levels;          // levels of the reduction tree whose states have a place in shared memory
    int32_t starts_at, angles_at, queries_at, fresh_at, tops_at, states_at, level_sums_at, stages_at, bytes;
};

// The first slot that any new token of a row sees, of which the first is cached at `slot`.
DEVICE int first_seen(const AttentionArgs& a, int slot) { return a.window > 0 ? max(slot + 1 - int(a.window), 0) : 0; }

// Facts of a launch that are in device memory. No kernel of the step writes them, so they are read before grid_wait().
struct Geometry {
    // slot: of a single row; splits: the most of any row; heads: rows * kv_heads * tiles.
    int slot, splits, heads;
    // For each row: the slot from which its KV splits are counted, and its new token's slot. After these, the item that
    // the block has fetched (attention_schedule.h).
    int *starts, *slots;
    DEVICE Geometry(const AttentionArgs& a, const AttentionPlan& plan, char* shared)
        : starts(reinterpret_cast<int*>(shared + plan.starts_at)),
          slots(starts + a.rows) {
        slot = a.rows > 1 ? 0 : int(a.slot[0]);
        find_starts(a);
        int longest = slot;
        if (a.rows > 1) {
            for (int row = lane_id(); row < int(a.rows); row += WARP_SIZE) longest = max(longest, slots[row]);
            for (int step = 1; step < WARP_SIZE; step *= 2) longest = max(longest, lane_xor(longest, step));
        }
        const int stop = longest + int(a.tokens);
        heads = int(a.rows * a.kv_heads) * plan.tiles;
        splits = (stop - 1) / KV_SPLIT + 1;
        if (a.window > 0) splits = min(splits, (stop - first_seen(a, longest)) / KV_SPLIT + 2);
    }
    // Where a row's first new token is cached.
    DEVICE int slot_of(const AttentionArgs& a, int row) const { return a.rows > 1 ? slots[row] : slot; }
    // The first slot of a row's own tokens, if positions count from there and all before it is hidden; else zero.
    DEVICE void find_starts(const AttentionArgs& a) {
        for (int row = threadIdx.x / WARP_SIZE; row < int(a.rows); row += WARPS) {
            const int cached = a.rows > 1 ? int(a.slot[row]) : slot;
            int own = cached - int(a.positions[row * a.tokens]);
            if (own < 0 || own > cached) own = 0;
            int seen = 0;
            for (int s = lane_id(); s < own; s += WARP_SIZE) seen |= a.mask[row * a.capacity + s] != 0;
            for (int step = 1; step < WARP_SIZE; step *= 2) seen |= lane_xor(seen, step);
            if (lane_id() == 0) starts[row] = seen ? 0 : own, slots[row] = cached;
        }
        __syncthreads();
    }
};

// KV splits of one head that follow each other: what a block takes at a time.
struct Segment {
    int row, kv, tile, head;  // tile: of queries
    int first, last;          // of the head's KV splits that any token sees
    int split, count;         // the first that is taken, and how many
    int begin;                // their first slot
    int slot;                 // of the row's first new token
    bool two_blocks;          // at most two blocks have all, of which the second can go on with the first one's sums
    DEVICE int splits() const { return last + 1 - first; }  // of the head
    DEVICE bool single() const { return first == last; }
    DEVICE bool ends() const { return split + count > last; }  // whether the head's last KV split is among them
    // Whether blocks need not gather what they have: one, or one after the other, adds up all in its own tree, of 1 <<
    // levels KV splits.
    DEVICE bool alone(int levels) const {
        return single() || ((two_blocks || (split == first && ends())) && first >> levels == last >> levels);
    }
    // How many KV splits it adds up at most: as readers of partial states expect, where others have to be added to
    // them.
    DEVICE int most(int levels) const { return alone(levels) ? 1 << levels : min(1 << levels, FAN_IN); }
    // Of such a pair, whether it is the first; whether the second, and does go on.
    DEVICE bool first_of_pair() const { return two_blocks && !ends(); }
    DEVICE bool second_of_pair(int levels) const { return two_blocks && split > first && alone(levels); }
};

// The slot of a warp's tile of a round, from the first of its KV split; whether any new token, of which the first has
// the slot `own`, sees something of it.
DEVICE int tile_at(int round) { return (round * WARPS + int(threadIdx.x) / WARP_SIZE) * TILE; }
DEVICE bool seen_tile(const AttentionArgs& a, int own, int slot) {
    return slot < own + int(a.tokens) && slot + TILE > first_seen(a, own);
}

// A block's partition of all KV splits of all heads, a head's one after the other: of one head alone, where that makes
// no block's share much longer, since a second head is begun anew. The last head comes first: what of it another block
// goes on with, as its last one, is then added up in time, as a rule.
struct StaticPartition {
    static constexpr int MOST_STAGES = 1 << 30;  // of a stream, which asks for the next segment so many stages early
    int at, end;
    int before, busy;     // blocks that have KV splits: of those before this one, and in all
    int part = 0, parts;  // of a head, where a block has KV splits of one alone; else no parts
    DEVICE StaticPartition(const Geometry& all, const AttentionArgs&) {
        const int blocks = int(gridDim.x), block = int(blockIdx.x), total = all.heads * all.splits;
        parts = blocks / all.heads;
        if (parts > 0 && (all.splits + parts - 1) / parts <= (total + blocks - 1) / blocks + 1) {
            const int head = min(block / parts, all.heads), each = min(parts, all.splits);
            part = block - head * parts;
            at = head * all.splits + (head < all.heads ? part * all.splits / parts : 0);
            end = head < all.heads ? head * all.splits + (part + 1) * all.splits / parts : at;
            before = head < all.heads ? head * each + part * each / parts : all.heads * each, busy = all.heads * each;
        } else {
            parts = 0;
            at = int(int64_t(total) * block / blocks), end = int(int64_t(total) * (block + 1) / blocks);
            before = min(at, block), busy = min(total, blocks);
        }
    }
    // Which block has a KV split, of all heads', where shares are not of one head. A float's quotient is off by one at
    // most.
    static DEVICE int block_of(int split, const Geometry& all) {
        const int64_t of = (split + int64_t(1)) * int(gridDim.x) - 1, total = all.heads * all.splits;
        int block = int(float(of) / float(total));
        if (block * total > of) --block;
        if ((block + 1) * total <= of) ++block;
        return block;
    }
    // Of the blocks that have KV splits of a segment's head, which this one is and how many there are.
    DEVICE void company(const Segment& s, const Geometry& all, int& which, int& many) const {
        const int count = s.last + 1 - s.first;
        if (parts > all.splits) {
            which = s.split - s.first, many = count;
        } else if (parts > 0) {
            which = part, many = min((count * parts + all.splits - 1) / all.splits, parts);
        } else {
            const int begin = s.head * all.splits, first = block_of(begin, all);
            which = int(blockIdx.x) - first, many = block_of(begin + count - 1, all) - first + 1;
        }
    }
    // Whether blocks have at least half a subtree's KV splits of a head, as a rule.
    DEVICE bool halves(const Geometry& all) const {
        return (parts > 0 ? all.splits / parts : all.heads * all.splits / int(gridDim.x)) >= FAN_IN / 2;
    }
    // The next segment that holds anything; false, and s stays, if there is none.
    DEVICE bool next(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        while (at < end) {
            Segment n;
            n.head = (end - 1) / all.splits;
            const int of = n.head / plan.tiles, skipped = max(at - n.head * all.splits, 0),
                      length = end - n.head * all.splits - skipped;
            n.tile = n.head - of * plan.tiles, n.row = of / int(a.kv_heads), n.kv = of - n.row * int(a.kv_heads);
            const int start = all.starts[n.row];
            n.slot = all.slot_of(a, n.row);
            n.first = a.window > 0 ? max(first_seen(a, n.slot) - start, 0) / KV_SPLIT : 0,
            n.last = (n.slot + int(a.tokens) - 1 - start) / KV_SPLIT;
            n.split = n.first + skipped, n.count = min(length, n.last + 1 - n.split);
            n.begin = start + n.split * KV_SPLIT;
            n.two_blocks = BLOCKS_MEET && a.rows > 1 && parts == 0 && all.heads >= int(gridDim.x);
            end -= length;
            if (n.count > 0) return s = n, true;
        }
        return false;
    }
    DEVICE bool more() const { return at < end; }  // whether next() has something to look at
    // The first; of a DynamicSchedule it may have to be fetched.
    DEVICE bool begin(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        return next(s, a, plan, all);
    }
};
