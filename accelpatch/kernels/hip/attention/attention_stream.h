// The cache's way to the matrix unit: of each KV split a warp's tiles of keys, then those of values: four stages. On
// NVIDIA a multi-stage buffer in shared memory, lines of it copied by neighbouring lanes and read by all; on AMD
// registers, one tile ahead, of what the lane needs.
#pragma once
#include "attention.h"

// ONCE: no other block reads the same keys and values.
template <class T, int WIDE, int BUFFER_BYTES, bool ONCE, class SCHEDULE> struct CacheStream {
    using Tile = AttentionTile<T>;
    static constexpr int STEPS = WIDE / 32;                                             // of 64 bytes of a key
    static constexpr int SETS = WIDE / 8 > Tile::CHUNKS ? WIDE / 8 / Tile::CHUNKS : 1;  // of chunks of a value
    static constexpr int CHUNKS = WIDE / 8;                                             // of 16 bytes, of a slot
    static constexpr int KEYS = SHARED_STAGES ? TILE * CHUNKS / WARP_SIZE : ROWS_PER_LANE * STEPS,
                         VALUES = SHARED_STAGES ? KEYS : 4 * SETS;  // pieces of a lane
    static constexpr int PIECES = KEYS > VALUES ? KEYS : VALUES, TILE_BYTES = PIECES * WARP_SIZE * 16;
    static constexpr int DEPTH =
        SHARED_STAGES ? (BUFFER_BYTES / (WARPS * TILE_BYTES) > 2 ? BUFFER_BYTES / (WARPS * TILE_BYTES) : 2) : 2;
    static_assert(DEPTH <= SCHEDULE::MOST_STAGES, "it asks for an item no earlier than in the split behind it");
    static constexpr int MASKS = (DEPTH + 3) / 4;  // of KV splits that are under way
    const AttentionArgs& a;
    const AttentionPlan& plan;
    const Geometry& all;
    char* stage_buffer;
    SCHEDULE schedule;
    // Of the KV split that is asked for; KV splits left of its segment; the buffer's slot; the row's.
    int begin = 0, left = 0, place = 0, own = 0;
    int64_t row = 0, at = 0;  // elements before the mask's row and the head's keys
    int64_t masks[MASKS];     // a slot of the warp's tiles of a KV split to each of 32 lanes
    Words4 held[SHARED_STAGES ? 1 : 2][SHARED_STAGES ? 1 : PIECES];

    DEVICE CacheStream(const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all, const SCHEDULE& behind,
        const Segment& s, char* shared)
        : a(a),
          plan(plan),
          all(all),
          stage_buffer(shared + plan.stages_at + int(threadIdx.x) / WARP_SIZE * DEPTH * TILE_BYTES),
          schedule(behind) {
        if constexpr (FIRST_KNOWN) switch_to(s);
        first<0>();
        if constexpr (LAUNCHES_OVERLAP && ONCE) bring<DEPTH % 4>();
    }
    // The stage behind the multi-stage buffer comes into L2, where the block's first segment goes on behind that KV
    // split: memory would lie idle until the kernel before has ended. Copies that leave L2 first leave it there; more
    // of it is slower for most caches.
    template <int STAGE> DEVICE void bring() const {
        const int slot = begin + tile_at(STAGE % 2);
        if (left > 1 && slot + TILE <= own && lane_id() == 0)
            prefetch_l2(static_cast<const char*>(STAGE / 2 ? a.values : a.keys) + (at + slot * a.size) * 2,
                int(a.size) * (TILE * 2));
    }
    DEVICE void switch_to(const Segment& s) {
        begin = s.begin, left = s.count, own = s.slot, row = s.row * a.capacity,
        at = (s.row * a.kv_heads + s.kv) * a.capacity * a.size;
    }
    template <int STAGE> DEVICE void first() {
        if constexpr (STAGE < DEPTH) prefetch<STAGE % 4, STAGE / 4, !FIRST_KNOWN || (STAGE > 0)>(), first<STAGE + 1>();
    }
    // Asks for what is DEPTH stages behind, into the slot of the stage that was read last.
    template <int STAGE> DEVICE void after() { prefetch<(STAGE + DEPTH) % 4, MASKS - 1, true>(); }
    // MORE: a segment may have to be begun.
    template <int STAGE, int MASK, bool MORE> DEVICE void prefetch() {
        if (Segment s; MORE && STAGE == 0 && RARELY(left == 0 && (!SHARED_STAGES || schedule.more())) &&
                       schedule.next(s, a, plan, all))
            switch_to(s);
        if (const int slot = begin + masked_at(); STAGE == 0 && left > 0)
            masks[MASK] = slot < own ? a.mask[row + slot] : 0;
        if (const int slot = begin + tile_at(STAGE % 2); left > 0 && seen_tile(a, own, slot)) {
            if (!SHARED_STAGES && a.size == WIDE && slot + TILE <= own) copy<STAGE, true>(slot);
            else copy<STAGE, false>(slot);
        }
        if (STAGE == 3 && left > 0) --left, begin += KV_SPLIT;
        commit_copies();
        if (SHARED_STAGES) place = place + 1 == DEPTH ? 0 : place + 1;
    }
    // FULL: all of the tile is cached, and a head fills its columns; else what is missing is zero. The code of a
    // multi-stage buffer has no room for both: instructions that are jumped over delay those behind them.
    template <int STAGE, bool FULL> DEVICE void copy(int slot) {
        constexpr bool VALUE = STAGE / 2;
        const int cached = FULL ? TILE : own - slot, size = FULL ? WIDE : int(a.size),
                  own_slot = slot_of_piece<VALUE>(0), own_chunk = chunk_of_piece<VALUE>(0);
        const char* from = static_cast<const char*>(VALUE ? a.values : a.keys) +
                           (at + (slot + own_slot) * int64_t(size)) * 2 + own_chunk * 16;
#pragma unroll
        for (int i = 0; i < (VALUE ? VALUES : KEYS); ++i) {
            const int s = slots_after<VALUE>(i), chunk = chunks_after<VALUE>(i);
            const bool there = FULL ? own_chunk < CHUNKS : s + own_slot < cached && (chunk + own_chunk) * 8 < size;
            const char* at = from + int64_t(s) * (size * 2) + chunk * 16;
            if constexpr (ONCE) stream_once16(piece(STAGE, i), at, there);
            else stream_copy<16>(piece(STAGE, i), at, there);
        }
    }
    // The slot and the chunk of a lane's pieces: of the first, and how much further the i-th is.
    template <bool VALUE> static DEVICE int slots_after(int i) {
        if constexpr (SHARED_STAGES) return i * WARP_SIZE / CHUNKS;
        else return VALUE ? Tile::value_slot_after(i % 4) : 8 * (i / STEPS);
    }
    template <bool VALUE> static DEVICE int chunks_after(int i) {
        if constexpr (SHARED_STAGES) return 0;
        else return VALUE ? i / 4 * Tile::CHUNKS : 4 * (i % STEPS);
    }
    template <bool VALUE> static DEVICE int slot_of_piece(int i) {
        if constexpr (SHARED_STAGES) return lane_id() / CHUNKS + slots_after<VALUE>(i);
        else return (VALUE ? Tile::value_slot() : fragment_row(0)) + slots_after<VALUE>(i);
    }
    template <bool VALUE> static DEVICE int chunk_of_piece(int i) {
        if constexpr (SHARED_STAGES) return lane_id() % CHUNKS;
        else return (VALUE ? Tile::value_chunk() : fragment_quarter()) + chunks_after<VALUE>(i);
    }
    // The slots of a KV split that are given, a bit each of the warp's tiles': shown by the mask, or new, and in some
    // token's window. Once a KV split, of a row whose first new token has the slot `cached`.
    DEVICE uint32_t given(int split, int cached) {
        const int slot = split + masked_at();
        const bool shown = slot < cached ? masks[0] != 0 : slot < cached + int(a.tokens);
        const uint32_t all_given = lane_vote(slot >= first_seen(a, cached) && shown);
#pragma unroll
        for (int i = 1; i < MASKS; ++i) masks[i - 1] = masks[i];
        return all_given;
    }
    static DEVICE int masked_at() { return tile_at(lane_id() / TILE % 2) + lane_id() % TILE; }
    DEVICE Words4* piece(int stage, int i) {
        if constexpr (SHARED_STAGES)
            return tile() + i * WARP_SIZE +
                   (lane_id() ^ Tile::mixed(lane_id() / CHUNKS) ^ Tile::mixed(i * WARP_SIZE / CHUNKS));
        else return &held[stage % 2][i];
    }
    DEVICE Words4* tile() { return reinterpret_cast<Words4*>(stage_buffer + place * TILE_BYTES); }
    // What a lane gives to a product: four lanes' chunks follow each other; of an odd step they lie before those of the
    // even one for half of the slots.
    DEVICE Words4 key(int stage, int h, int step) {
        if constexpr (SHARED_STAGES)
            return tile()[fragment_row(h) * CHUNKS + step / 2 * 8 +
                          (fragment_quarter() ^ Tile::mixed(fragment_row(0)) ^ step % 2 * 4)];
        else return held[stage % 2][h * STEPS + step];
    }
    DEVICE const Words4* values(int stage) {
        if constexpr (SHARED_STAGES) return tile();
        else return held[stage % 2];
    }
    // The new slots' keys or values into their tile, whichever lane's they are: all lanes' copies have come, and all
    // wait. cached: the first new token's slot.
    template <int STAGE, class STAGER> DEVICE void put_new(int slot, int cached, const STAGER& stager) {
        constexpr bool VALUE = STAGE / 2;
        if constexpr (SHARED_STAGES) {
            const int chunk = lane_id();
            Words4* into = tile();
            warp_sync();
#pragma unroll 1
            for (int token = max(slot - cached, 0); token < min(slot + TILE - cached, int(a.tokens)); ++token) {
                const int s = cached + token - slot;
                if (chunk < WIDE / 8)
                    into[s * CHUNKS + (chunk ^ Tile::mixed(s))] = stager.fresh_piece(token, VALUE, chunk);
            }
            warp_sync();
        } else {
            each<STAGE>([&](Words4& at, int s, int chunk) {
                if (const int token = slot + s - cached; token >= 0 && token < int(a.tokens) && chunk * 8 < WIDE)
                    at = stager.fresh_piece(token, VALUE, chunk);
            });
        }
    }
    // Zeros for the values of slots that are not given: what they hold must not matter.
    template <int STAGE> DEVICE void hide(uint32_t given) {
        each<STAGE>([&](Words4& at, int s, int) {
            if (!(given >> s & 1)) at = {0, 0, 0, 0};
        });
    }
    // All that a lane holds of a tile; rarely done, and rolled.
    template <int STAGE, class WORK> DEVICE void each(const WORK& work) {
        constexpr bool VALUE = STAGE / 2;
#pragma unroll(SHARED_STAGES ? 1 : PIECES)
        for (int i = 0; i < (VALUE ? VALUES : KEYS); ++i)
            work(*piece(STAGE, i), slot_of_piece<VALUE>(i), chunk_of_piece<VALUE>(i));
    }
    // Waits for the oldest tile, which piece() gives until after().
    DEVICE void wait() { wait_copies<DEPTH>(); }
};
