// Products with codes, as AMD's matrix units take them: as bfloat16, that any byte of a word becomes by way of a float.
// Part of attention_mma.h.
#pragma once

// Two numbers that bfloat16 holds exactly.
DEVICE uint32_t exact_pair(float low, float high) { return permute<0x7632>(float_to_bits(low), float_to_bits(high)); }
template <class CODES, int I> DEVICE uint32_t pair_of(uint32_t codes) {
    return exact_pair(CODES::up(codes >> 8 * I), CODES::up(codes >> 8 * (I + 1)));
}
// Eight codes of two words as eight numbers.
template <class CODES> DEVICE Words4 expanded(uint32_t low, uint32_t high) {
    return {pair_of<CODES, 0>(low), pair_of<CODES, 2>(low), pair_of<CODES, 0>(high), pair_of<CODES, 2>(high)};
}

template <class T, class CODES, int WIDE, bool SOLE>
struct KeyMma<Coded<T, CODES>, WIDE, SOLE> : CacheTile<Coded<T, CODES>> {
    struct Query {
        Words4 first, second;  // eight columns, and eight
    };
    static DEVICE Query query(const Words4* from, int chunk) { return {from[2 * chunk], from[2 * chunk + 1]}; }
    DEVICE void add(const Query& q, const Words4* k) {
        Words4 v[ROWS_PER_LANE];
        for (int h = 0; h < ROWS_PER_LANE; ++h) v[h] = expanded<CODES>(k[h].x, k[h].y);
        this->add_keys(q.first, v);
        for (int h = 0; h < ROWS_PER_LANE; ++h) v[h] = expanded<CODES>(k[h].z, k[h].w);
        this->add_keys(q.second, v);
    }
};

// A lane has eight columns of each of its four slots.
template <class T, class CODES, int SETS, bool SOLE> struct ValueMma<Coded<T, CODES>, SETS, SOLE> {
    using Tile = CacheTile<Coded<T, CODES>>;
    using Weights = typename Tile::Weights;
    using Sums = float[SETS][Tile::PARTS][4];
    Sums& sums;
    DEVICE explicit ValueMma(Sums& sums) : sums(sums) { zero_all(sums); }
    DEVICE void scale(const float (&)[ROUNDS][4]) {}
    DEVICE Weights weights(const float* s) const { return Tile::weights(s); }
    DEVICE void add(const Words4* values, int, const Weights& w) {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part)
                add_column(sums[set][part], reinterpret_cast<const Words2*>(values) + set * 4, part, w);
    }
    static DEVICE void add_column(float* sums, const Words2* v, int column, const Weights& w) {
        float up[4];
        for (int i = 0; i < 4; ++i) up[i] = CODES::up((column / 4 ? v[i].y : v[i].x) >> 8 * (column % 4));
        MatrixMma<T> all;
        for (int i = 0; i < 4; ++i) all.sum[i] = sums[i];
        multiply_halves<T>(all.sum, exact_pair(up[0], up[1]), exact_pair(up[2], up[3]), w.first, w.second);
        for (int i = 0; i < 4; ++i) sums[i] = all.sum[i];
    }
    DEVICE void finish() {}
};
