// Copies of 3-bit weights from a tile to a lane: two words of a row, and the third word; see Int3 in formats.h.
#pragma once
#include "weight_tiles.h"

// Byte offsets in a tile, for this lane: of the first two words of row r; and of the third words of rows r % 8 and
// r % 8 + 8, which lie together.
DEVICE int pair_place(int r) { return (4 * (r & 7) + fragment_quarter()) * 16 + (r & 8); }
DEVICE int third_place(int r) { return 512 + (4 * (r & 7) + fragment_quarter()) * 8; }

// Starts the copies of a stage. from: pair_place in the tile of the first step. there, second: whether the first and
// the second step exist; else zeros are written. With stages in shared memory they go to `into`, in the order of the
// tile; else to `in_registers`.
template <class F>
DEVICE void copy_three_bits(char* into, Slot<F>* in_registers, const char* from, bool there, bool second) {
    const int r = fragment_row(0), third = third_place(r) - pair_place(r);
#pragma unroll
    for (int u = 0; u < PAIR<F>; ++u) {
        const int begin = u * F::STEP_BYTES;
        if constexpr (SHARED_STAGES) {
            stream_copy<16>(into + begin, from + begin, u ? second : there);
            stream_copy<8>(into + begin + third, from + begin + third, u ? second : there);
        } else {
            stream_copy<8>(&in_registers[u].w[0].x, from + begin, u ? second : there);
            stream_copy<4>(&in_registers[u].w[0].z, from + begin + third + (r & 8) / 2, u ? second : there);
        }
    }
}

// Reads a step's words from shared memory. from: this lane's place there. Precondition: the copies have arrived.
template <class F> DEVICE void read_three_bits(Slot<F>& out, const char* from) {
    struct alignas(8) Thirds {
        uint32_t v[2];
    };
    const Words4 first = *reinterpret_cast<const Words4*>(from);
    const Thirds third = *reinterpret_cast<const Thirds*>(from + 512 - lane_id() * 8);
#pragma unroll
    for (int h = 0; h < ROWS_PER_LANE; ++h)
        out.w[h] = {word_of(first, 2 * h), word_of(first, 2 * h + 1), third.v[h], 0u};
}
