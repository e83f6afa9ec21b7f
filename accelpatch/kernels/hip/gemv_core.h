// The one kernel behind gemv, gemv_int8, gemv_int4 and gemv_fp8.
//
// A block's eight waves take one or two tiles of 16 rows at a time; the waves of a tile share its K, turn by turn, and
// add up through shared memory in a fixed order. Nothing but the number of columns stored depends on M, so a row's bits
// do not either. Weights stream through a ring that is filled before grid_wait(); activations lie in shared memory, in
// phases of K.
#pragma once
#include "formats.h"
#include "fragment.h"
#include "gemv.h"
#include "ring.h"

constexpr int WAVES = 8, THREADS = WAVES * WAVE;
constexpr int PARTIAL_STRIDE = 20;  // floats of one token and wave: 16 rows and a pad against bank conflicts

template <class F> constexpr int SCALE_BYTES = 4 * F::GROUPS;  // a row pair and step
template <class F> constexpr int SLOT_BYTES = 1024 + WAVE * SCALE_BYTES<F> * (1 + F::OFFSETS);  // a wave and step
// Formats with much beside the weights leave little room in registers, where AMD keeps the ring.
template <class F> constexpr bool CROWDED = ACCELPATCH_AMD && F::GROUPS * (1 + F::OFFSETS) >= 4;
template <class F> constexpr int STEPS_A_TURN = CROWDED<F> ? 1 : 2;  // two at once hide each other's latencies

// One lane's place in the stream of weights.
template <class F, class T> struct Stream {
    using Fragment = FragmentFor<F, T>;
    static constexpr int TABLE = F::GROUPS * Fragment::SCALE_ROWS;  // words of scales a lane and step
    static constexpr int WORDS = TABLE > 0 ? TABLE : 1;
    static constexpr bool OWN = F::TAKES && !Fragment::OWN_ROWS;  // what expand() needs is beside, for other rows
    static constexpr int OWN_WORDS = OWN ? F::GROUPS : 1;
    static constexpr int PAIR = STEPS_A_TURN<F>;
    static constexpr int RING_UNROLL = ACCELPATCH_AMD && !(F::SUMS && F::GROUPS > 2) ? 2 : 1;  // turns in flight where they live in registers
    struct Slot {
        Words4 w[ROWS_PER_LANE];
        uint32_t scale[WORDS], offset[WORDS], own_offset[OWN_WORDS];
    };
    const GemvArgs& a;
    const GemvPlan& plan;
    int wk, wn;            // the wave's share of K, and its tile in the block
    int round, phase;      // of tiles, of K
    int i, n, valid, step; // turn in the phase, how many, how many with a step, the step of K
    const char* row[ROWS_PER_LANE];
    const char* scale;     // the tile's

    DEVICE Stream(const GemvArgs& a, const GemvPlan& plan, int wk, int wn) : a(a), plan(plan), wk(wk), wn(wn), round(0), phase(0) { enter(); }
    DEVICE void restart() { round = phase = 0, enter(); }
    static DEVICE int steps_here(const GemvPlan& plan, int phase) {
        const int left = plan.steps - phase * plan.phase_steps;
        return left < plan.phase_steps ? left : plan.phase_steps;
    }
    // A wave's turns in a phase (a turn is PAIR neighbouring steps; waves take them one after the other), and with those
    // that fill AMD's unrolled rounds.
    static DEVICE int valid_turns(const GemvPlan& plan, int phase, int wk) {
        return ((steps_here(plan, phase) + PAIR - 1) / PAIR - wk + (1 << plan.waves_shift) - 1) >> plan.waves_shift;
    }
    static DEVICE int whole_turns(int valid) { return (valid + RING_UNROLL - 1) / RING_UNROLL * RING_UNROLL; }
    // Blocks share each round evenly, so that a last, shorter round is spread over all of them.
    static DEVICE int tile_of(const GemvPlan& plan, int round, int wn) { return ((round * WAVES >> plan.waves_shift) + wn) * gridDim.x + blockIdx.x; }
    static DEVICE int64_t weight_row(const GemvArgs& a, int tile, int r) {
        if (a.activation != ACT_SILU_GATE) return int64_t(tile) * 16 + r;
        const int64_t half = a.n / 2, at = int64_t(tile) * 8 + (r & 7);
        return at < half ? at + (r >> 3) * half : a.n;
    }
    DEVICE int stride() const { return PAIR << plan.waves_shift; }  // steps from a wave's turn to its next
    // To the next phase with turns for this wave; none are left where n stays 0.
    DEVICE void enter() {
        int tile;
        while ((tile = tile_of(plan, round, wn)) < plan.tiles) {
            valid = valid_turns(plan, phase, wk);
            if (valid > 0) break;
            if (++phase == plan.phases) phase = 0, ++round;
        }
        i = 0;
        if (tile >= plan.tiles) tile = 0, valid = 0;
        n = whole_turns(valid);
        step = phase * plan.phase_steps + wk * PAIR;
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            const int r = fragment_row(h);
            if constexpr (F::TILED) {
                row[h] = static_cast<const char*>(a.w) + int64_t(tile) * plan.steps * F::STEP_BYTES + (4 * r + fragment_quarter()) * 16;
            } else {
                const int64_t at = weight_row(a, tile, r);
                row[h] = static_cast<const char*>(a.w) + (at < a.n ? at : a.n - 1) * (a.k * F::VALUE_BITS / 8) + fragment_quarter() * PART_BYTES;
            }
        }
        const int sets = ((plan.steps - 1) >> a.group_shift) + 1;
        scale = static_cast<const char*>(a.scale) + (int64_t(tile) * sets * 8 + Fragment::scale_pair()) * SCALE_BYTES<F>;
    }
    DEVICE void advance() {
        step += stride();
        if (++i < n || n == 0) return;
        if (++phase == plan.phases) phase = 0, ++round;
        enter();
    }
    // Bytes from row[] to a part of a step's piece, and from scale to the step's set.
    static DEVICE int piece(int step, int part) { return step * F::STEP_BYTES + part * 32; }
    DEVICE const char* from(int h, int u, int part) const {  // in a tile the rows lie at a fixed distance: one address will do
        return F::TILED ? row[0] + h * 512 + int64_t(step) * F::STEP_BYTES + piece(u, part) : row[h] + int64_t(step) * F::STEP_BYTES + piece(u, part);
    }
    DEVICE int room() const { return int(a.k * F::VALUE_BITS / 8) - fragment_quarter() * PART_BYTES; }  // of a row, from this lane's first piece on
    DEVICE int set(int u) const { return ((step + u) >> a.group_shift) * 8 * SCALE_BYTES<F>; }
    DEVICE bool has(int u) const { return i < valid && step + u < plan.steps; }
    DEVICE const char* offsets() const { return static_cast<const char*>(a.offset) + (scale - static_cast<const char*>(a.scale)); }
    static constexpr int PARTS = F::SPLIT ? 2 : 1, PART_BYTES = 16 / PARTS;

    // Rows that no 16-byte load may touch: byte by byte, zeros past the row's end.
    DEVICE Words4 gather(const char* from, int u) const {
        uint32_t out[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int byte = 0; byte < 16; ++byte) {
            const int at = piece(step + u, byte / PART_BYTES) + byte % PART_BYTES;
            const uint32_t v = at < room() ? static_cast<uint8_t>(from[at]) : 0u;
            for (int j = 0; j < 4; ++j) out[j] |= (byte >> 2) == j ? v << (8 * (byte & 3)) : 0u;
        }
        return {out[0], out[1], out[2], out[3]};
    }
#if ACCELPATCH_AMD
    DEVICE void issue(Slot (&slots)[PAIR]) {
        if (F::TILED || plan.w_aligned) {
#pragma unroll
            for (int u = 0; u < PAIR; ++u) {
                uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    if (has(u) && (F::TILED || piece(step + u, part) < room())) stream_load<PART_BYTES>(w + part * PART_BYTES / 4, row[0] + piece(step + u, part));
                slots[u].w[0] = {w[0], w[1], w[2], w[3]};
            }
        } else {
#pragma unroll
            for (int u = 0; u < PAIR; ++u) slots[u].w[0] = has(u) ? gather(row[0], u) : Words4{0, 0, 0, 0};
        }
        if constexpr (F::GROUPS > 0) {
#pragma unroll
            for (int u = 0; u < PAIR; ++u) {
                if (!has(u)) continue;
                const auto scales = reinterpret_cast<const uint32_t*>(scale + set(u)), beside = reinterpret_cast<const uint32_t*>(offsets() + set(u));
                for (int j = 0; j < TABLE; ++j) {
                    slots[u].scale[j] = scales[j];
                    if (F::OFFSETS && !OWN) slots[u].offset[j] = beside[j];
                }
                const int own = (fragment_row(0) % 8 - Fragment::scale_pair()) * F::GROUPS;
                for (int j = 0; OWN && j < OWN_WORDS; ++j) {
                    slots[u].own_offset[j] = beside[own + j];
                }
            }
        }
        advance();
    }
#else
    DEVICE void issue(char* slots) {  // this lane's
        if (i < valid && step + PAIR <= plan.full_steps) {
#pragma unroll
            for (int u = 0; u < PAIR; ++u) {
#pragma unroll
                for (int h = 0; h < ROWS_PER_LANE; ++h)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        stream_copy<PART_BYTES>(slots + u * SLOT_BYTES<F> + h * WAVE * 16 + part * 8, from(h, u, part));
                copy_tables(slots, u);
            }
        } else if (i < valid) {
            edge(slots);
        }
        ring_commit();
        advance();
    }
    DEVICE void copy_tables(char* slots, int u) const {
        if constexpr (F::GROUPS > 0) {
            constexpr int BYTES = SCALE_BYTES<F>;
            char* into = slots + u * SLOT_BYTES<F> + 1024 - lane_id() * (16 - BYTES);
            stream_copy<BYTES>(into, scale + set(u));
            if (F::OFFSETS) stream_copy<BYTES>(into + WAVE * BYTES, offsets() + set(u));
        }
    }
    // A turn that reaches past the row's end, or whose rows are not aligned: zeros where there is no weight and no scale.
    DEVICE void edge(char* slots) const {
        constexpr int BYTES = SCALE_BYTES<F>;
#pragma unroll 1
        for (int at = 0; at < PAIR * ROWS_PER_LANE * PARTS; ++at) {
            const int part = at % PARTS, h = at / PARTS % ROWS_PER_LANE, u = at / PARTS / ROWS_PER_LANE;
            char* into = slots + u * SLOT_BYTES<F> + h * WAVE * 16 + part * 8;
            const char* start = h && !F::TILED ? row[ROWS_PER_LANE - 1] : row[0] + h * 512;
            const int there = piece(step + u, part);
            if (!F::TILED && !plan.w_aligned) {
                if (part == 0) *reinterpret_cast<Words4*>(into) = has(u) ? gather(start, u) : Words4{0, 0, 0, 0};
            } else if (has(u) && (F::TILED || there < room())) {
                stream_copy<PART_BYTES>(into, start + there);
            } else {
                for (int word = 0; word < PART_BYTES; word += 4) *reinterpret_cast<uint32_t*>(into + word) = 0;
            }
        }
        if constexpr (F::GROUPS > 0) {
#pragma unroll 1
            for (int u = 0; u < PAIR; ++u) {
                char* table = slots + u * SLOT_BYTES<F> + 1024 - lane_id() * (16 - BYTES);
                if (has(u)) copy_tables(slots, u);
                for (int word = 0; word < BYTES && !has(u); word += 4) {
                    *reinterpret_cast<uint32_t*>(table + word) = 0;
                    if (F::OFFSETS) *reinterpret_cast<uint32_t*>(table + WAVE * BYTES + word) = 0;
                }
            }
        }
    }
    static DEVICE void read(Slot& out, const char* slot) {
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) out.w[h] = *reinterpret_cast<const Words4*>(slot + h * WAVE * 16);
        if constexpr (F::GROUPS > 0) {
            constexpr int BYTES = SCALE_BYTES<F>;
            const char* at = slot + 1024 - lane_id() * (16 - BYTES);
#pragma unroll
            for (int j = 0; j < TABLE; ++j) {
                out.scale[j] = reinterpret_cast<const uint32_t*>(at)[j];
                if (F::OFFSETS) out.offset[j] = reinterpret_cast<const uint32_t*>(at + WAVE * BYTES)[j];
            }
        }
    }
#endif
};
