// Products with values that are codes, as NVIDIA's matrix units take them. Part of attention_codes.h.
#pragma once

// Two neighbouring codes are read across as one 16-bit number: the even columns of 32 are a product, and the odd ones.
template <class T, class CODES> struct CacheTile<Coded<T, CODES>> : AttentionTile<Coded<T, CODES>> {
    using Tile = AttentionTile<Coded<T, CODES>>;
    static DEVICE void add_codes(
        float* even, float* odd, const Words4* tile, int chunks, int product, const typename Tile::Weights& w) {
        const int slot = (lane_id() & 7) + (lane_id() >> 4) * 8;
        const int mixed = chunks < 8 ? slot >> 1 & 3 : Tile::mixed(slot);
        uint32_t v[4];
        load_transposed(v, tile + slot * chunks + product / 8 * 8 + ((lane_id() >> 3 & 1) ^ mixed ^ product % 8));
        multiply_halves<T>(even, CODES::template pair<0, 2>(v[0], v[0]), CODES::template pair<0, 2>(v[1], v[1]),
            CODES::template pair<0, 2>(v[2], v[2]), CODES::template pair<0, 2>(v[3], v[3]), w.first, w.second);
        multiply_halves<T>(odd, CODES::template pair<1, 3>(v[0], v[0]), CODES::template pair<1, 3>(v[1], v[1]),
            CODES::template pair<1, 3>(v[2], v[2]), CODES::template pair<1, 3>(v[3], v[3]), w.first, w.second);
    }
    static DEVICE int cell_column(int part, int i) {
        return part / 2 * 32 + 16 * (i >> 1) + 2 * (lane_id() >> 2) + part % 2;
    }
};
