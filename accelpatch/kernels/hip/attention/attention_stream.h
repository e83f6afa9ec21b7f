// Loads keys and values of the cache for the matrix unit. A warp has four stages of each KV split: its tiles of keys,
// then those of values. On NVIDIA they go through a multi-stage buffer in shared memory, into which neighbouring lanes
// copy whole lines that all lanes read; on AMD each lane loads what it needs into registers, one tile ahead.
#pragma once
#include <type_traits>

#include "attention_mma.h"

// ONCE: no other block reads the same keys and values.
template <class T, int WIDE, int BUFFER_BYTES, bool ONCE, class SCHEDULE> struct CacheStream {
    using Tile = CacheTile<T>;
    static constexpr bool CODES = CODED<T>;
    static constexpr int BYTES = CACHE_BYTES<T>;
    static constexpr int STEPS = WIDE / 32;                                             // products of a key
    static constexpr int SETS = WIDE / 8 > Tile::CHUNKS ? WIDE / 8 / Tile::CHUNKS : 1;  // of eight columns of a value
    static constexpr int CHUNKS = WIDE * BYTES / 16;                                    // of 16 bytes, of a slot
    static constexpr int KEY_PIECES = STEPS * BYTES / 2;                                // of a lane, of a slot
    static constexpr int KEYS = SHARED_STAGES ? TILE * CHUNKS / WARP_SIZE : ROWS_PER_LANE * KEY_PIECES,
                         VALUES = SHARED_STAGES ? KEYS : 4 * SETS;  // pieces of a lane
    // Bytes of a value's piece: of codes in registers eight columns, as of numbers.
    static constexpr int VALUE_BYTES = SHARED_STAGES ? 16 : 8 * BYTES;
    static constexpr int PIECES = KEYS > VALUES *VALUE_BYTES / 16 ? KEYS : VALUES *VALUE_BYTES / 16,
                         TILE_BYTES = PIECES * WARP_SIZE * 16;
    template <bool VALUE> static constexpr int PIECE_BYTES = VALUE ? VALUE_BYTES : 16;
    static constexpr int DEPTH =
        SHARED_STAGES ? (BUFFER_BYTES / (WARPS * TILE_BYTES) > 2 ? BUFFER_BYTES / (WARPS * TILE_BYTES) : 2) : 2;
    static_assert(DEPTH <= SCHEDULE::MOST_STAGES, "it asks for an item no earlier than in the split behind it");
    static constexpr int MASKS = (DEPTH + 3) / 4;  // of KV splits that are under way
    const AttentionArgs& a;
    const AttentionPlan& plan;
    const Geometry& all;
    char* stage_buffer;
    SCHEDULE schedule;
    // begin: the first slot of the KV split that is prefetched next. left: KV splits left of its segment. place: the
    // stage of the buffer. own: the row's first new slot.
    int begin = 0, left = 0, place = 0, own = 0;
    int64_t row = 0, head = 0, at = 0;  // element offsets of the mask's row, of the head's scales and of its keys
    int64_t masks[MASKS];               // of each KV split: the mask of one slot of the warp's tiles a lane
    uint32_t scales[MASKS];             // for codes: the scale of that slot's key, and of its value in the upper half
    uint32_t scale = 0;                 // the same for the KV split that is being computed; zero for hidden slots
    Words4 in_registers[SHARED_STAGES ? 1 : 2][SHARED_STAGES ? 1 : PIECES];

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
    // Prefetches the stage after those of the multi-stage buffer into L2, where the block's first segment has a further
    // KV split: memory would idle until the kernel before has ended. Evict-first copies leave it there; more
    // of it is slower for most caches.
    template <int STAGE> DEVICE void bring() const {
        const int slot = begin + tile_at(STAGE % 2);
        if (left > 1 && slot + TILE <= own && lane_id() == 0)
            prefetch_l2(static_cast<const char*>(STAGE / 2 ? a.values : a.keys) + (at + slot * a.size) * BYTES,
                int(a.size) * (TILE * BYTES));
    }
    DEVICE void switch_to(const Segment& s) {
        begin = s.begin, left = s.count, own = s.slot, row = s.row * a.capacity,
        head = (s.row * a.kv_heads + s.kv) * a.capacity, at = head * a.size;
    }
    template <int STAGE> DEVICE void first() {
        if constexpr (STAGE < DEPTH) prefetch<STAGE % 4, STAGE / 4, !FIRST_KNOWN || (STAGE > 0)>(), first<STAGE + 1>();
    }
    // Prefetches the stage that is DEPTH stages later, into the buffer's stage that was read last. Precondition: all
    // lanes have read it.
    template <int STAGE> DEVICE void after() { prefetch<(STAGE + DEPTH) % 4, MASKS - 1, true>(); }
    // MORE: the current segment may be at its end, and the next may have to be fetched from the schedule.
    template <int STAGE, int MASK, bool MORE> DEVICE void prefetch() {
        if (Segment s; MORE && STAGE == 0 && RARELY(left == 0 && (!SHARED_STAGES || schedule.more())) &&
                       schedule.next(s, a, plan, all))
            switch_to(s);
        if (const int slot = begin + masked_at(); STAGE == 0 && left > 0)
            masks[MASK] = slot < own ? a.mask[row + slot] : 0, scales[MASK] = scale_at(slot);
        if (const int slot = begin + tile_at(STAGE % 2); left > 0 && seen_tile(a, own, slot)) {
            if (!SHARED_STAGES && a.size == WIDE && slot + TILE <= own) copy<STAGE, true>(slot);
            else copy<STAGE, false>(slot);
        }
        if (STAGE == 3 && left > 0) --left, begin += KV_SPLIT;
        commit_copies();
        if (SHARED_STAGES) place = place + 1 == DEPTH ? 0 : place + 1;
    }
    DEVICE uint32_t scale_at(int slot) const {
        if (!CODES || slot >= own) return 0;
        return uint32_t(a.key_scales[head + slot]) | uint32_t(a.value_scales[head + slot]) << 16;
    }
    // FULL: all slots of the tile are cached and the head size is WIDE; else what is missing is zero. With a
    // multi-stage buffer only the general form is compiled: instructions that are jumped over delay those after them.
    template <int STAGE, bool FULL> DEVICE void copy(int slot) {
        constexpr bool VALUE = STAGE / 2;
        const int cached = FULL ? TILE : own - slot, size = FULL ? WIDE : int(a.size),
                  own_slot = slot_of_piece<VALUE>(0), own_chunk = chunk_of_piece<VALUE>(0);
        const char* from = static_cast<const char*>(VALUE ? a.values : a.keys) +
                           (at + (slot + own_slot) * int64_t(size)) * BYTES + own_chunk * PIECE_BYTES<VALUE>;
#pragma unroll
        for (int i = 0; i < (VALUE ? VALUES : KEYS); ++i) {
            const int s = slots_after<VALUE>(i), chunk = chunks_after<VALUE>(i);
            constexpr int SIZE = PIECE_BYTES<VALUE>, COLUMNS = SIZE / BYTES;
            const bool there =
                FULL ? own_chunk < WIDE / COLUMNS : s + own_slot < cached && (chunk + own_chunk) * COLUMNS < size;
            const char* at = from + int64_t(s) * (size * BYTES) + chunk * SIZE;
            if constexpr (ONCE && SIZE == 16) stream_once16(piece<VALUE>(STAGE, i), at, there);
            else stream_copy<SIZE>(piece<VALUE>(STAGE, i), at, there);
        }
    }
    // The slot and the chunk of a lane's pieces: of the first, and how much further the i-th is.
    template <bool VALUE> static DEVICE int slots_after(int i) {
        if constexpr (SHARED_STAGES) return i * WARP_SIZE / CHUNKS;
        else return VALUE ? Tile::value_slot_after(i % 4) : 8 * (i / KEY_PIECES);
    }
    template <bool VALUE> static DEVICE int chunks_after(int i) {
        if constexpr (SHARED_STAGES) return 0;
        else return VALUE ? i / 4 * Tile::CHUNKS : 4 * (i % KEY_PIECES);
    }
    template <bool VALUE> static DEVICE int slot_of_piece(int i) {
        if constexpr (SHARED_STAGES) return lane_id() / CHUNKS + slots_after<VALUE>(i);
        else return (VALUE ? Tile::value_slot() : fragment_row(0)) + slots_after<VALUE>(i);
    }
    template <bool VALUE> static DEVICE int chunk_of_piece(int i) {
        if constexpr (SHARED_STAGES) return lane_id() % CHUNKS;
        else return (VALUE ? Tile::value_chunk() : fragment_quarter()) + chunks_after<VALUE>(i);
    }
    // Which slots of the warp's tiles of a KV split are visible, a bit each: shown by the mask, or new, and in some
    // token's window. Precondition: all lanes call it, once a KV split. cached: the slot of the row's first new token.
    template <class STAGER> DEVICE uint32_t given(int split, int cached, const STAGER& stager) {
        const int slot = split + masked_at();
        const bool fresh = slot >= cached && slot < cached + int(a.tokens);
        const bool shown = slot < cached ? masks[0] != 0 : fresh, mine = slot >= first_seen(a, cached) && shown;
        const uint32_t all_given = lane_vote(mine);
        if constexpr (CODES) scale = !mine ? 0 : fresh ? stager.fresh_scales(slot - cached) : scales[0];
#pragma unroll
        for (int i = 1; i < MASKS; ++i) masks[i - 1] = masks[i], scales[i - 1] = scales[i];
        return all_given;
    }
    // The scales of the i-th of a lane's slots of a round's tile: the key's, and the value's in the upper half.
    DEVICE uint32_t scales_of(int round, int i) const {
        return float_to_bits(from_lane(bits_to_float(scale), round * TILE + Tile::slot(i)));
    }
    static DEVICE int masked_at() { return tile_at(lane_id() / TILE % 2) + lane_id() % TILE; }
    // The swizzle of a slot's chunks. Where a slot has four chunks, two slots fill the banks.
    static DEVICE constexpr int swizzle(int slot) {
        if constexpr (CHUNKS < 8) return slot >> 1 & 3;
        else return Tile::swizzle(slot);
    }
    template <bool VALUE> DEVICE char* piece(int stage, int i) {
        if constexpr (SHARED_STAGES)
            return reinterpret_cast<char*>(
                tile() + i * WARP_SIZE + (lane_id() ^ swizzle(lane_id() / CHUNKS) ^ swizzle(i * WARP_SIZE / CHUNKS)));
        else return reinterpret_cast<char*>(in_registers[stage % 2]) + i * PIECE_BYTES<VALUE>;
    }
    DEVICE Words4* tile() { return reinterpret_cast<Words4*>(stage_buffer + place * TILE_BYTES); }
    // A lane's operand of the i-th matrix product of a slot. The chunks of four lanes follow each other; for half of
    // the slots those of an odd product lie before those of the even one.
    DEVICE Words4 key(int stage, int h, int i) {
        if constexpr (SHARED_STAGES)
            return tile()[fragment_row(h) * CHUNKS + i / 2 * 8 +
                          (fragment_quarter() ^ swizzle(fragment_row(0)) ^ i % 2 * 4)];
        else return in_registers[stage % 2][h * KEY_PIECES + i];
    }
    // Which chunk of a query is multiplied by the operand that key() gives.
    static DEVICE int query_chunk(int i) { return 4 * i + fragment_quarter(); }
    DEVICE const Words4* values(int stage) {
        if constexpr (SHARED_STAGES) return tile();
        else return in_registers[stage % 2];
    }
    // Writes the keys or values of new tokens into their tile. Precondition: all lanes call it, after their copies of
    // the tile have arrived. With shared stages a warp barrier before and one after order it with other lanes' copies
    // and reads. cached: the slot of the first new token.
    template <int STAGE, class STAGER> DEVICE void put_new(int slot, int cached, const STAGER& stager) {
        constexpr bool VALUE = STAGE / 2;
        if constexpr (SHARED_STAGES) {
            const int chunk = lane_id();
            Words4* into = tile();
            warp_sync();
#pragma unroll 1
            for (int token = max(slot - cached, 0); token < min(slot + TILE - cached, int(a.tokens)); ++token) {
                const int s = cached + token - slot;
                if (chunk < CHUNKS)
                    into[s * CHUNKS + (chunk ^ swizzle(s))] = stager.template fresh_piece<Words4>(token, VALUE, chunk);
            }
            warp_sync();
        } else {
            each<STAGE>([&](auto& at, int s, int chunk) {
                using Piece = std::remove_reference_t<decltype(at)>;
                if (const int token = slot + s - cached;
                    token >= 0 && token < int(a.tokens) && chunk * int(sizeof(at)) < WIDE * BYTES)
                    at = stager.template fresh_piece<Piece>(token, VALUE, chunk);
            });
        }
    }
    // Zeros for the values of slots that are not given: what they hold must not matter.
    template <int STAGE> DEVICE void hide(uint32_t given) {
        each<STAGE>([&](auto& at, int s, int) {
            if (!(given >> s & 1)) at = {};
        });
    }
    // All that a lane holds of a tile; rarely done, and rolled.
    template <int STAGE, class WORK> DEVICE void each(const WORK& work) {
        constexpr bool VALUE = STAGE / 2;
#pragma unroll(SHARED_STAGES ? 1 : KEYS + VALUES)
        for (int i = 0; i < (VALUE ? VALUES : KEYS); ++i)
            work(*reinterpret_cast<std::conditional_t<PIECE_BYTES<VALUE> == 16, Words4, Words2>*>(
                     piece<VALUE>(STAGE, i)),
                slot_of_piece<VALUE>(i), chunk_of_piece<VALUE>(i));
    }
    // Waits for the oldest tile, which piece() gives until after().
    DEVICE void wait() { wait_copies<DEPTH>(); }
};
