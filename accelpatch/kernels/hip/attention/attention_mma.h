// Matrix products of queries with a tile of keys, and of weights with a tile of values: for a cache of 16-bit floats
// here, for one of codes in the header that is included at the end.
#pragma once
#include "attention.h"

template <class T> struct CacheTile : AttentionTile<T> {};  // specialised for codes, whose sums may be in other lanes

// The form of queries in shared memory. For caches of codes it may be another one, with a scale.
template <class T> struct QueryForm {
    static constexpr bool SCALED = false;
};

// The scores of a tile's slots. SOLE: there is only one query.
template <class T, int WIDE, bool SOLE> struct KeyMma : CacheTile<T> {
    using Query = Words4;
    static DEVICE Query query(const Words4* from, int chunk) { return from[chunk]; }
    // Eight columns of a query, and of ROWS_PER_LANE slots.
    DEVICE void add(const Query& q, const Words4* k) { this->add_keys(q, k); }
};

template <class Sums> DEVICE void zero_all(Sums& sums) {
    for (auto& set : sums)
        for (auto& part : set)
            for (auto& v : part) v = 0;
}

// Weighted sums of the values of a warp's tiles of a KV split.
template <class T, int SETS, bool SOLE> struct ValueMma {
    using Tile = CacheTile<T>;
    using Weights = typename Tile::Weights;
    using Sums = float[SETS][Tile::PARTS][4];
    Sums& sums;
    DEVICE explicit ValueMma(Sums& sums) : sums(sums) { zero_all(sums); }
    DEVICE void scale(const float (&)[ROUNDS][4]) {}  // of all weights, before the first product
    DEVICE Weights weights(const float* s) const { return Tile::weights(s); }  // of a tile
    DEVICE void add(const Words4* values, int chunks, const Weights& w) {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part)
                Tile::add_values(sums[set][part], values, chunks, set, part, w);
    }
    DEVICE void finish() {}  // after the last product
};

#if defined(__HIP__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#include "attention_codes_amd.h"
#else
#include "attention_codes_nvidia.h"
#endif
