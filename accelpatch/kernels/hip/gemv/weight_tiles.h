// Weights of a tile: the bytes of a step, what a lane has of them, and where rows and scales lie.
#pragma once
#include "experts/stacked.h"

template <class F> constexpr int SCALE_BYTES = 4 * F::GROUPS;                         // a row pair and step
template <class F> constexpr int TABLES = F::GROUPS ? 1 + two_tables(F::OFFSET) : 0;  // scales, offsets
template <class F> constexpr int WEIGHT_BYTES = COMPACT<F> || THREE_BITS<F> ? F::STEP_BYTES : 1024;  // a warp and step
template <class F> constexpr int TABLE_BYTES = 8 * SCALE_BYTES<F>;  // of a tile and step
template <class F> constexpr int SLOT_BYTES = WEIGHT_BYTES<F> + TABLE_BYTES<F> * TABLES<F>;
// Of a stage in shared memory: the scales of its 16 rows, where a stage has scales.
template <class F> constexpr int STAGE_SCALE_BYTES = SHARED_STAGES && STAGE_SCALES<F> ? 64 : 0;

// Steps of K in a stage: two hide each other's latencies, where there are registers for their scales.
template <class F> constexpr int PAIR = F::GROUPS * SCALE_PAIRS * TABLES<F> > 8 ? 1 : 2;
template <class F> constexpr int STREAM_STAGE_BYTES = PAIR<F> * SLOT_BYTES<F> + STAGE_SCALE_BYTES<F>;

// What a lane has of one step, in registers.
template <class F> struct Slot {
    static constexpr int WORDS = F::GROUPS ? F::GROUPS * SCALE_PAIRS : STAGE_SCALES<F> ? 2 : 1;
    Words4 w[ROWS_PER_LANE];
    uint32_t exponents[COMPACT<F> ? 2 * ROWS_PER_LANE : 1];  // two words a row
    uint32_t scale[WORDS], offset[WORDS];
};

// The number of blocks that share the tiles.
template <class F> DEVICE int tile_blocks(const GemvPlan& plan) {
    return STACKED<F> ? plan.experts.blocks : int(gridDim.x);
}
// Blocks share each round of tiles evenly, so that a last, shorter round is spread over all of them.
template <class F> DEVICE int tile_of(const GemvPlan& plan, int round, int wn) {
    const int block = STACKED<F> ? int(blockIdx.x) % plan.experts.blocks : int(blockIdx.x);
    return ((round * WARPS >> plan.warps_shift) + wn) * tile_blocks<F>(plan) + block;
}
// The weight row of a tile's row r; a.n or more where there is none.
DEVICE int64_t weight_row(const GemvArgs& a, int tile, int r) {
    if (a.activation != ACT_SILU_GATE) return int64_t(tile) * 16 + r;
    const int64_t half = a.n / 2, at = int64_t(tile) * 8 + (r & 7);
    return at < half ? at + (r >> 3) * half : a.n;
}
// Copies a stage's scales, one for each of its 16 rows, into the multi-stage buffer: a row a lane, and the lane 16
// further copies the same row. read_stage_scales reads those of a lane's rows. Both do nothing where a stage has no
// scales, or is in registers. scale: the address of the stage's scale of this lane's row.
template <class F>
DEVICE void copy_stage_scales(const GemvArgs& a, char* into, const char* scale, int tile, bool there) {
    if constexpr (STAGE_SCALE_BYTES<F> > 0)
        stream_copy<4>(into + (lane_id() & 15) * 4, scale, there && weight_row(a, tile, lane_id() & 15) < a.n);
}
template <class F> DEVICE void read_stage_scales(Slot<F>& slot, const char* from) {
    if constexpr (STAGE_SCALE_BYTES<F> > 0)
        for (int h = 0; h < 2; ++h) slot.scale[h] = *reinterpret_cast<const uint32_t*>(from + fragment_row(h) * 4);
}
template <class F> DEVICE int64_t row_bytes(const GemvArgs& a) { return a.k * F::VALUE_BITS / 8; }
template <class F> DEVICE int64_t scale_sets(const GemvArgs& a, const GemvPlan& plan) {
    return F::GROUPS ? ((plan.steps - 1) >> a.group_shift) + 1 : 0;
}

// The address of the first scales (or offsets) of a tile that a lane copies into the multi-stage buffer, or loads into
// its registers.
template <class F> DEVICE const char* first_scales(const GemvArgs& a, const GemvPlan& plan, int tile) {
    if constexpr (STAGE_SCALE_BYTES<F> > 0) {
        const int64_t stages = (plan.steps + PAIR<F> - 1) / PAIR<F>;
        return static_cast<const char*>(a.scale) + weight_row(a, tile, lane_id() & 15) * stages * 4;
    }
    constexpr bool SHARED_TABLES = SHARED_STAGES && F::GROUPS > 0;
    const int pair = SHARED_TABLES ? lane_id() & 7 : scale_pair();
    return static_cast<const char*>(SHARED_TABLES && TABLES<F> > 1 && lane_id() & 16 ? a.offset : a.scale) +
           ((STACKED<F> ? 0 : tile * scale_sets<F>(a, plan) * 8) + pair) * SCALE_BYTES<F>;
}

// Loads 16 bytes of a row one by one, where 16-byte loads are not aligned; zeros past the row's end, which is `room`
// bytes after `from`.
template <int RUN> static __device__ __noinline__ Words4 gather(const char* from, int room) {
    uint32_t out[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int byte = 0; byte < 16; ++byte) {
        const int at = byte / RUN * 32 + byte % RUN;
        const uint32_t v = at < room ? static_cast<uint8_t>(from[at]) : 0u;
        for (int j = 0; j < 4; ++j) out[j] |= (byte >> 2) == j ? v << (8 * (byte & 3)) : 0u;
    }
    return {out[0], out[1], out[2], out[3]};
}
