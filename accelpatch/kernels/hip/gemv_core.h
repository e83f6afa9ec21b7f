// The one kernel behind gemv, gemv_int8, gemv_int4 and gemv_fp8.
//
// A block takes WN tiles of 16 rows at a time; WK waves share a tile's K, step by step in turn, and add up through shared
// memory in a fixed order. Nothing but the number of columns stored depends on M, so a row's bits do not either.
// Weights stream through a ring that is filled before grid_wait(); activations lie in shared memory, in phases of K.
#pragma once
#include "formats.h"
#include "fragment.h"
#include "gemv.h"
#include "ring.h"

constexpr int PARTIAL_STRIDE = 20;                   // floats a token: 16 rows and a pad against bank conflicts
constexpr int PARTIAL_FLOATS = 8 * PARTIAL_STRIDE;   // one wave's partial sums

template <class F> constexpr int SCALE_BYTES = 4 * F::GROUPS;  // a row pair and step
template <class F, bool OFFSET> constexpr int SLOT_BYTES = 1024 + WAVE * SCALE_BYTES<F> * (1 + OFFSET);  // a wave

// One lane's place in the stream of weights.
template <class F, class T, bool OFFSET> struct Stream {
    using Fragment = typename FragmentOf<T>::Type;
    static constexpr int TABLE = F::GROUPS * Fragment::SCALE_ROWS;  // words of scales a lane and step
    static constexpr int WORDS = TABLE > 0 ? TABLE : 1;
    struct Slot {
        Words4 w[ROWS_PER_LANE];
        uint32_t scale[WORDS], offset[WORDS];
    };
    const GemvArgs& a;
    const GemvPlan& plan;
    int wk, wn, wks, wns;     // wave's share of K, its tile in the block, how many of each
    int group, phase, i, n;   // tile group, phase, step in turn, steps a turn
    const char* row[ROWS_PER_LANE];
    int64_t row_bytes;
    bool live;

    DEVICE Stream(const GemvArgs& a, const GemvPlan& plan, int wk, int wn, int wks, int wns)
        : a(a), plan(plan), wk(wk), wn(wn), wks(wks), wns(wns), group(blockIdx.x), phase(0), i(0) {
        row_bytes = a.k * F::VALUE_BITS / 8;
        enter();
    }
    // Rounds of steps in a phase, alike for all waves; AMD pads to whole turns of its unrolled loop.
    static DEVICE int rounds(const GemvPlan& plan, int phase, int wks) {
        const int left = plan.steps - phase * plan.phase_steps;
        const int here = left < plan.phase_steps ? left : plan.phase_steps;
        const int each = (here + wks * F::RUN - 1) / (wks * F::RUN) * F::RUN;
        return (each + RING_UNROLL - 1) / RING_UNROLL * RING_UNROLL;
    }
    // The step of K that this wave's i-th turn is, counted inside the phase.
    static DEVICE int step_of(int i, int wk, int wks) { return (i / F::RUN * wks + wk) * F::RUN + i % F::RUN; }
    static DEVICE int64_t weight_row(const GemvArgs& a, int tile, int r) {
        if (a.activation != ACT_SILU_GATE) return int64_t(tile) * 16 + r;
        const int64_t half = a.n / 2, at = int64_t(tile) * 8 + (r & 7);
        return at < half ? at + (r >> 3) * half : a.n;
    }
    DEVICE void enter() {
        const int tile = group * wns + wn;
        live = tile < plan.tiles;
        n = rounds(plan, phase, wks);
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            const int r = fragment_row(h);
            if constexpr (F::TILED) {
                row[h] = static_cast<const char*>(a.w) + int64_t(live ? tile : 0) * plan.steps * F::STEP_BYTES +
                         (4 * r + fragment_quarter()) * 16;
            } else {
                const int64_t at = live ? weight_row(a, tile, r) : 0;
                row[h] = static_cast<const char*>(a.w) + (at < a.n ? at : a.n - 1) * row_bytes;
            }
        }
    }
    DEVICE void advance() {
        if (++i < n) return;
        i = 0;
        if (++phase == plan.phases) phase = 0, group += gridDim.x;
        enter();
    }
    DEVICE int step() const {
        const int s = step_of(i, wk, wks);
        const int at = phase * plan.phase_steps + s;
        return live && s < plan.phase_steps && at < plan.steps ? at : -1;
    }
    DEVICE int64_t scale_at(int s) const {  // bytes into the packed scales
        const int tile = group * wns + wn;
        const int sets = ((plan.steps - 1) >> a.group_shift) + 1;
        return ((int64_t(tile) * sets + (s >> a.group_shift)) * 8 + Fragment::scale_pair()) * SCALE_BYTES<F>;
    }
    // Bytes from the row's start to the lane's piece of 16, or of 8 where the step is split.
    DEVICE int64_t piece(int s, int part) const {
        if constexpr (F::TILED) return int64_t(s) * F::STEP_BYTES;
        if constexpr (F::SPLIT) return int64_t(s) * F::STEP_BYTES + part * 32 + fragment_quarter() * 8;
        return int64_t(s) * F::STEP_BYTES + fragment_quarter() * 16;
    }
    static constexpr int PARTS = F::SPLIT ? 2 : 1, PART_BYTES = 16 / PARTS;

    // Rows that no 16-byte load may touch: byte by byte, zeros past the row's end.
    DEVICE Words4 gather(const char* from, int64_t at) const {
        uint32_t out[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part)
#pragma unroll 1
            for (int b = 0; b < PART_BYTES; ++b) {
                const int64_t where = at + part * 32 + b;
                const uint32_t v = where < row_bytes ? static_cast<uint8_t>(from[where]) : 0u;
                const int byte = part * 8 + b;
                for (int j = 0; j < 4; ++j) out[j] |= (byte >> 2) == j ? v << (8 * (byte & 3)) : 0u;
            }
        return {out[0], out[1], out[2], out[3]};
    }
#if ACCELPATCH_AMD
    DEVICE void issue(Slot& slot) {
        const int s = step();
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            uint32_t w[4] = {0, 0, 0, 0};
            if (s >= 0) {
                if (F::TILED || plan.w_aligned) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        const int64_t at = piece(s, part);
                        if (F::TILED || at < row_bytes) stream_load<PART_BYTES>(w + part * PART_BYTES / 4, row[h] + at);
                    }
                } else {
                    const Words4 v = gather(row[h], piece(s, 0));
                    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
                }
            }
            slot.w[h] = {w[0], w[1], w[2], w[3]};
        }
        if constexpr (F::GROUPS > 0) {
            const int64_t at = s >= 0 ? scale_at(s) : -1;
            for (int j = 0; j < TABLE; ++j) {
                slot.scale[j] = at >= 0 ? reinterpret_cast<const uint32_t*>(static_cast<const char*>(a.scale) + at)[j] : 0;
                if (OFFSET) slot.offset[j] = at >= 0 ? reinterpret_cast<const uint32_t*>(static_cast<const char*>(a.offset) + at)[j] : 0;
            }
        }
        advance();
    }
#else
    DEVICE void issue(char* slot, uint64_t policy) {  // slot: this wave's
        const int s = step();
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            char* into = slot + (h * WAVE + lane_id()) * 16;
            if (F::TILED || plan.w_aligned) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const int64_t at = s >= 0 ? piece(s, part) : 0;
                    const bool valid = s >= 0 && (F::TILED || at < row_bytes);
                    stream_copy<PART_BYTES>(into + part * 8, row[h] + (valid ? at : 0), valid ? PART_BYTES : 0, policy);
                }
            } else {
                *reinterpret_cast<Words4*>(into) = s >= 0 ? gather(row[h], piece(s, 0)) : Words4{0, 0, 0, 0};
            }
        }
        if constexpr (F::GROUPS > 0) {
            constexpr int BYTES = SCALE_BYTES<F>;
            const int64_t at = s >= 0 ? scale_at(s) : 0;
            char* into = slot + 1024 + lane_id() * BYTES;
            stream_copy<BYTES>(into, static_cast<const char*>(a.scale) + at, s >= 0 ? BYTES : 0, policy);
            if (OFFSET) stream_copy<BYTES>(into + WAVE * BYTES, static_cast<const char*>(a.offset) + at, s >= 0 ? BYTES : 0, policy);
        }
        ring_commit();
        advance();
    }
    DEVICE void read(Slot& out, const char* slot) const {
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) out.w[h] = *reinterpret_cast<const Words4*>(slot + (h * WAVE + lane_id()) * 16);
        if constexpr (F::GROUPS > 0) {
            constexpr int BYTES = SCALE_BYTES<F>;
            const char* at = slot + 1024 + lane_id() * BYTES;
#pragma unroll
            for (int j = 0; j < TABLE; ++j) {
                out.scale[j] = reinterpret_cast<const uint32_t*>(at)[j];
                if (OFFSET) out.offset[j] = reinterpret_cast<const uint32_t*>(at + WAVE * BYTES)[j];
            }
        }
    }
    // Asks for the lines beyond the ring, as far as `steps` reach.
    DEVICE void prefetch(int steps) {
        for (; steps > 0; --steps, advance()) {
            const int s = step();
            if (s < 0) continue;
            for (int h = 0; h < ROWS_PER_LANE; ++h) {
                const int64_t at = piece(s, 0);
                if (F::TILED ? (lane_id() & 7) == 0 : (fragment_quarter() == 0 && (s & 1) == 0 && at < row_bytes)) prefetch_l2(row[h] + at);
            }
        }
    }
#endif
};
