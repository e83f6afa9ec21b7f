// The instances: tiles, outputs and forms, numbered as in build/ck_libraries.py, and what follows from them.
#pragma once
#include "host.h"

namespace w8a8 {

// Rows and columns of a block's tile, 32x32 MFMAs of a wavefront along each, values of K in a load.
template <int ROWS, int COLUMNS, int ROW_MFMAS, int COLUMN_MFMAS, int K_VECTOR> struct Tile {
    static constexpr int rows = ROWS, columns = COLUMNS, row_mfmas = ROW_MFMAS, column_mfmas = COLUMN_MFMAS;
    static constexpr int k_vector = K_VECTOR;
};
template <int NUMBER> struct TileOf;
template <> struct TileOf<0> : Tile<256, 128, 4, 2, 16> {};
template <> struct TileOf<1> : Tile<64, 128, 1, 2, 16> {};
template <> struct TileOf<2> : Tile<64, 128, 1, 2, 1> {};    // any K and N, with loads of single values
template <> struct TileOf<3> : Tile<128, 128, 2, 2, 16> {};  // the large one with scales

// E's type, which is D's too
template <int NUMBER> struct OutputOf;
template <> struct OutputOf<0> {
    using type = int8_t;
};
template <> struct OutputOf<1> {
    using type = float;
};
template <> struct OutputOf<2> {
    using type = uint16_t;
};  // bf16
template <> struct OutputOf<3> {
    using type = _Float16;
};

// Forms: without D, with D, and both with a scale for each row and column. CK loads Ds and E by vectors of one length,
// which is 1 with a row's scale.
template <int FORM, int OUTPUT, int TILE> struct InstanceOf {
    using Tile = TileOf<TILE>;
    using E = typename OutputOf<OUTPUT>::type;
    static constexpr bool has_d = FORM % 2, scaled = FORM >= 2;
    static constexpr int threads = 256, k_tile = 64;
    static constexpr int n_vector = scaled || Tile::k_vector == 1 ? 1 : 16 / int(sizeof(E));
    static constexpr Instance limits = {
        Tile::rows, Tile::columns, k_tile, Tile::k_vector, n_vector, sizeof(E), sizeof(E), has_d, scaled};
};

}  // namespace w8a8
