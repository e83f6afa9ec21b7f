// Attention: matrix products of a tile of 16 slots with up to 8 queries. Part of nvidia.h.
#pragma once

constexpr int ATTENTION_WIDEST = 256;                             // columns of a head
constexpr int ATTENTION_DEEP = 98304, ATTENTION_SHALLOW = 65536;  // bytes of a block's multi-stage buffer
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool FIRST_KNOWN = false;  // true would spill registers
#else
// Whether the stream is passed the block's first segment; else it fetches it from the schedule once more.
constexpr bool FIRST_KNOWN = true;
#endif
// A lane has four scores, of two queries with two slots of a tile: score i is of slot(i) and of query(query_index(i)).
// ldmatrix reads values across the slots: each of its rows is eight columns of one slot.
template <class T> struct AttentionTile {
    // CHUNKS: chunks of eight columns that make a set. PARTS: matrix products of a set with a tile, 16 columns each.
    static constexpr int CHUNKS = 8, PARTS = 4;
    static constexpr int QUERIES_PER_LANE = 2;
    float c[2][4];
    static DEVICE int key_query() { return lane_id() >> 2; }  // the query that the lane passes to products with keys
    static DEVICE constexpr int query_index(int i) { return i & 1; }
    static DEVICE int query(int index) { return 2 * (lane_id() & 3) + index; }
    static DEVICE int slot(int i) { return (lane_id() >> 2) + 8 * (i >> 1); }
    static DEVICE constexpr int first_of_slot(int i) { return i & 2; }  // the first score that has the slot of score i
    // The slots of a tile follow each other in shared memory. The low bits of a chunk's index are exclusive-ored with
    // these, so that what is read at once is in different banks: four chunks of two slots, and one chunk of eight.
    static DEVICE constexpr int swizzle(int slot) { return (slot & 1) << 2 | (slot >> 1 & 3); }
    // Reduces v with `op` over the lanes that have the same queries.
    template <class F> static DEVICE float reduce_lanes(float v, const F& op) {
#pragma unroll
        for (int step = 4; step < WARP_SIZE; step *= 2) v = op(v, lane_xor(v, step));
        return v;
    }
    DEVICE void zero() {
        for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = 0.f;
    }
    DEVICE void add_keys(const Words4& q, const Words4* k) {
        multiply_halves<T>(c[0], k[0].x, k[1].x, k[0].y, k[1].y, q.x, q.y),
            multiply_halves<T>(c[1], k[0].z, k[1].z, k[0].w, k[1].w, q.z, q.w);
    }
    DEVICE float score(int i) const { return c[0][i] + c[1][i]; }
    // The softmax weights of a lane's scores, as operand of the products with values.
    struct Weights {
        uint32_t first, second;
    };
    static DEVICE Weights weights(const float* s) {
        return {transposed(T::down_pair(s[0], s[1])), transposed(T::down_pair(s[2], s[3]))};
    }
    // Adds to four sums: sum i is of column cell_column(part, i) of set `set`, for query cell_query(i). chunks: of a
    // slot of the tile.
    static DEVICE void add_values(float* sums, const Words4* tile, int chunks, int set, int part, const Weights& w) {
        const int slot = (lane_id() & 7) + (lane_id() >> 4) * 8;
        const Words4* from = tile + slot * chunks + set * CHUNKS + ((lane_id() >> 3 & 1) ^ swizzle(slot) ^ part * 2);
        uint32_t v[4];
        load_transposed(v, from);
        multiply_halves<T>(sums, v[0], v[1], v[2], v[3], w.first, w.second);
    }
    static DEVICE int cell_query(int i) { return 2 * (lane_id() & 3) + (i & 1); }
    static DEVICE int cell_column(int part, int i) { return part * 16 + (lane_id() >> 2) + 8 * (i >> 1); }
    static DEVICE bool owns() { return true; }
};
