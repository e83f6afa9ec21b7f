// Attention, as in nvidia_attention.h. On gfx90a subnormals of fp16 keys, values and softmax weights count as zero.
// Part of amd.h.
#pragma once

constexpr int ATTENTION_WIDEST = 128;  // columns of a head; more would spill registers
constexpr int ATTENTION_DEEP = 0, ATTENTION_SHALLOW = 0;
constexpr bool FIRST_KNOWN = false;  // true would spill registers
// A lane has the scores of one query with four slots of a tile. Values are loaded by lane: one chunk of four slots.
template <class T> struct AttentionTile {
    static constexpr int CHUNKS = 16, PARTS = 8, QUERIES_PER_LANE = 1;
    MatrixMma<T> mma;
    static DEVICE int key_query() { return lane_id() & 15; }
    static DEVICE constexpr int query_index(int) { return 0; }
    static DEVICE int query(int) { return lane_id() & 15; }
    static DEVICE int slot(int i) { return 4 * (lane_id() >> 4) + i; }
    static DEVICE constexpr int first_of_slot(int i) { return i; }
    static DEVICE int value_slot_after(int i) { return i; }
    static DEVICE int value_slot() { return 4 * (lane_id() >> 4); }
    static DEVICE int value_chunk() { return lane_id() & 15; }
    template <class F> static DEVICE float reduce_lanes(float v, const F& op) {
        v = op(v, lane_xor(v, 16));
        return op(v, lane_xor(v, 32));
    }
    DEVICE void zero() { mma.zero(); }
    DEVICE void add_keys(const Words4& q, const Words4* k) {
        multiply_halves<T>(mma.sum, k[0].x, k[0].y, q.x, q.y), multiply_halves<T>(mma.sum, k[0].z, k[0].w, q.z, q.w);
    }
    DEVICE float score(int i) const { return mma.sum[i]; }
    struct Weights {
        uint32_t first, second;
    };
    static DEVICE Weights weights(const float* s) { return {T::down_pair(s[0], s[1]), T::down_pair(s[2], s[3])}; }
    static DEVICE void add_values(float* sums, const Words4* piece, int, int set, int part, const Weights& w) {
        const Words4* v = piece + set * 4;
        const uint32_t a = word_of(v[0], part / 2), b = word_of(v[1], part / 2), c = word_of(v[2], part / 2),
                       d = word_of(v[3], part / 2);
        MatrixMma<T> all;
        for (int i = 0; i < 4; ++i) all.sum[i] = sums[i];
        if (part % 2) multiply_halves<T>(all.sum, permute<0x7632>(a, b), permute<0x7632>(c, d), w.first, w.second);
        else multiply_halves<T>(all.sum, permute<0x5410>(a, b), permute<0x5410>(c, d), w.first, w.second);
        for (int i = 0; i < 4; ++i) sums[i] = all.sum[i];
    }
    static DEVICE int cell_query(int) { return lane_id() & 15; }
    static DEVICE int cell_column(int part, int i) { return (4 * (lane_id() >> 4) + i) * 8 + part; }
    static DEVICE bool owns() { return (lane_id() & 15) < 8; }
};
