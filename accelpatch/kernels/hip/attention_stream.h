// The cache's way to the matrix unit: tiles of keys and of values in turn, each wave its own. A lane copies what it will
// read itself, so that no barrier guards it. On NVIDIA a ring in shared memory; on AMD registers, one tile ahead.
#pragma once
#include "attention.h"

template <class T, int WIDE, int RING> struct CacheStream {
    using Tile = AttentionTile<T>;
    static constexpr int STEPS = WIDE / 32;                                            // of 64 bytes of a key
    static constexpr int SETS = WIDE / 8 > Tile::CHUNKS ? WIDE / 8 / Tile::CHUNKS : 1;  // of chunks of a value
    static constexpr int KEYS = ROWS_PER_LANE * STEPS, VALUES = 4 * SETS;              // pieces of 16 bytes of a lane
    static constexpr int PIECES = KEYS > VALUES ? KEYS : VALUES, TILE_BYTES = PIECES * WAVE * 16;
    static constexpr int SLOT_BYTES = TILE_BYTES + MASK_BYTES;
    static constexpr int DEPTH = SHARED_RING ? (RING / (WAVES * TILE_BYTES) > 2 ? RING / (WAVES * TILE_BYTES) : 2) : 2;
    static constexpr int AFTER_KEYS = DEPTH % 2, AFTER_VALUES = (DEPTH + 1) % 2;  // what is asked for when a tile has been read
    const AttentionArgs& a;
    const AttentionPlan& plan;
    const Geometry& all;
    char* ring;
    Share share;
    int slot = 0, end = 0, place = 0;  // of the tile that is asked for next and of its segment; the ring's slot
    int64_t row = 0, at = 0;           // elements before the mask's row and the head's keys
    uint32_t held_mask[SHARED_RING ? 1 : 2];
    Words4 held[SHARED_RING ? 1 : 2][SHARED_RING ? 1 : PIECES];

    DEVICE CacheStream(const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all, char* shared)
        : a(a), plan(plan), all(all), ring(shared + plan.ring_at + int(threadIdx.x) / WAVE * DEPTH * SLOT_BYTES), share(all) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) i % 2 ? issue<1>() : issue<0>();
    }
    // Asks for the next tile, into the slot that was read last. Keys and values of a tile follow each other.
    template <int KIND> DEVICE void issue() {
        while (KIND == 0 && slot >= end) {
            Segment s;
            if (!share.next(s, a, plan, all)) break;
            slot = s.first_tile(all), end = s.end, row = s.row * a.capacity, at = (s.row * a.kv_heads + s.kv) * a.capacity * a.size;
        }
        if (slot < end) {
            if (a.size == WIDE && slot + TILE <= all.slot) copy<KIND, true>();
            else copy<KIND, false>();
            slot += KIND * Segment::STRIDE;
        }
        ring_commit();
        if (SHARED_RING) place = place + 1 == DEPTH ? 0 : place + 1;
    }
    // WHOLE: all of the tile is cached, and a head fills its columns; else what is missing is zero.
    template <int KIND, bool WHOLE> DEVICE void copy() {
        const int cached = WHOLE ? TILE : all.slot - slot, size = WHOLE ? WIDE : int(a.size);
        const char* from = static_cast<const char*>(KIND ? a.values : a.keys) + (at + slot * int64_t(size)) * 2;
        if (const int s = lane_id(); KIND == 0 && s < TILE) stream_copy<8>(mask(), a.mask + row + slot + s, s < cached);
        from += (KIND ? Tile::slot(0) : fragment_row(0)) * size * 2 + (KIND ? Tile::chunk() : fragment_quarter()) * 16;
#pragma unroll
        for (int i = 0; i < (KIND ? VALUES : KEYS); ++i) {
            const int s = KIND ? Tile::slot_after(i % 4) : 8 * (i / STEPS), chunk = KIND ? i / 4 * Tile::CHUNKS : 4 * (i % STEPS);
            const bool there = WHOLE || (s + (KIND ? Tile::slot(0) : fragment_row(0)) < cached && (chunk + (KIND ? Tile::chunk() : fragment_quarter())) * 8 < size);
            stream_copy<16>(piece(KIND, i), from + s * size * 2 + chunk * 16, there && (WIDE / 8 >= Tile::CHUNKS || chunk + Tile::chunk() < WIDE / 8 || !KIND));
        }
    }
    // The mask of a tile of keys, a slot to each of the first lanes.
    DEVICE uint32_t* mask() { return SHARED_RING ? reinterpret_cast<uint32_t*>(ring + place * SLOT_BYTES + TILE_BYTES + lane_id() % TILE * 8) : held_mask; }
    DEVICE Words4* piece(int kind, int i) {
        if constexpr (SHARED_RING) return reinterpret_cast<Words4*>(ring + place * SLOT_BYTES + (i * WAVE + lane_id()) * 16);
        else return &held[kind][i];
    }
    // Waits for the oldest tile; piece() gives it until issue().
    DEVICE void wait() { ring_wait<DEPTH>(); }
};
