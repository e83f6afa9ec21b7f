// Products with values that are codes, as AMD's matrix units take them. Part of attention_codes.h.
#pragma once

// A lane has eight columns of each of its four slots.
template <class T, class CODES> struct CacheTile<Coded<T, CODES>> : AttentionTile<Coded<T, CODES>> {
    using Tile = AttentionTile<Coded<T, CODES>>;
    static DEVICE void add_codes(
        float* even, float* odd, const Words4* piece, int, int product, const typename Tile::Weights& w) {
        const Words2* v = reinterpret_cast<const Words2*>(piece) + product / Tile::PARTS * 4;
        add_column(even, v, product % Tile::PARTS, w), add_column(odd, v, product % Tile::PARTS + 1, w);
    }
    static DEVICE void add_column(float* sums, const Words2* v, int column, const typename Tile::Weights& w) {
        float up[4];
        for (int i = 0; i < 4; ++i) up[i] = CODES::up((column / 4 ? v[i].y : v[i].x) >> 8 * (column % 4));
        MatrixMma<T> all;
        for (int i = 0; i < 4; ++i) all.sum[i] = sums[i];
        multiply_halves<T>(all.sum, exact_pair(up[0], up[1]), exact_pair(up[2], up[3]), w.first, w.second);
        for (int i = 0; i < 4; ++i) sums[i] = all.sum[i];
    }
};
