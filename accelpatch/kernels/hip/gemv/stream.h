// The weights' way to the matrix unit: a multi-stage buffer for each warp alone, so that no barrier guards it. On
// NVIDIA asynchronous copies into shared memory; on AMD registers, one stage ahead.
#pragma once
#include "three_bits.h"

// One lane's stream of weights: its warp's stages of tile after tile. No branch is taken but for the end of a tile and
// where there is none. Half of the multi-stage buffer is asked for at once (in clusters one stage of int4's deep one,
// since the kernel before still reads), the rest behind the activations: they are waited for, and would queue behind
// all of it.
//
// K_TILED: K comes in K tiles. The warp's tiles of two rounds go through one K tile before either goes on to the next.
template <class F, int DEPTH, bool K_TILED = false> struct Stream {
    static constexpr int PREFETCHED = K_TILED && F::TILED && DEPTH > CLUSTER_DEPTH ? 1 : (DEPTH + 1) / 2;
    static constexpr int RUNS = F::SPLIT ? 2 : 1, RUN_BYTES = 16 / RUNS;  // of a row's bytes in a step
    // Whole lines of 128 bytes, eight lanes each: row r of the tile and its chunk c lie in the place of step r / 8,
    // mixed so that banks differ for the two rows' chunks that are read at once. Else each lane copies what it will
    // read itself.
    static constexpr bool LINES = SHARED_STAGES && !F::TILED && !F::SPLIT && PAIR<F> == 2;
    // From the row of one of a lane's copies to its next one's, within a half of the tile.
    static constexpr int COPIED_ROWS = LINES ? 4 : 1;
    // Whether a stage's scales and offsets lie in shared memory: of each lane one piece.
    static constexpr bool SHARED_TABLES = SHARED_STAGES && F::GROUPS > 0;
    static_assert(!SHARED_TABLES || PAIR<F> * TABLES<F> * 8 <= WARP_SIZE, "a piece a lane");
    using Stage = Slot<F>[PAIR<F>];
    static constexpr int TABLES_AT = PAIR<F> * WEIGHT_BYTES<F>, ROW_TABLES = PAIR<F> * TABLES<F> * F::GROUPS;
    const GemvArgs& a;
    const GemvPlan& plan;
    const int first, stride;  // the warp's first stage in a tile, and from one to the next, in steps
    int tile, step;           // of the next stage
    int k_tile = 0, end;      // where its K tile begins and ends, in steps
    int other = 0;            // 1: its tile is the second that goes through the K tile
    int rows[ROWS_PER_LANE];  // of row-major weights
    const char *row[ROWS_PER_LANE], *scale;
    char* stage_buffer;  // this lane's place in it
    int slot = 0;        // bytes from there to the next stage's
    Slot<F> held[SHARED_STAGES ? 1 : PAIR<F>];
    static constexpr bool LATE = !SHARED_STAGES && Slot<F>::WORDS * TABLES<F> > 16;  // more than registers hold ahead
    const char* tables;
    int64_t set_at[PAIR<F>];  // in a stack, of the next stage

    // Warp wk of those that share a tile; `tile` is its first.
    DEVICE Stream(const GemvArgs& a, const GemvPlan& plan, int wk, int tile, char* stage_buffer)
        : a(a),
          plan(plan),
          first(wk * PAIR<F>),
          stride(PAIR<F> << plan.warps_shift),
          tile(tile),
          step(first),
          stage_buffer(stage_buffer) {
        if (first >= plan.steps) this->tile = plan.tiles;  // no stage at all
        end = K_TILED ? k_tile_end() : plan.steps;
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            const int r = LINES ? lane_id() / 8 + 8 * h : fragment_row(h),
                      chunk = LINES ? lane_id() % 8 : fragment_quarter();
            if constexpr (F::TILED) {
                row[h] = static_cast<const char*>(a.w) + (STACKED<F> ? 0 : int64_t(tile) * plan.steps * F::STEP_BYTES) +
                         (THREE_BITS<F> ? pair_place(r) : (4 * r + fragment_quarter()) * 16);
            } else {
                rows[h] = int(weight_row(a, tile, r));
                row[h] = static_cast<const char*>(a.w) + rows[h] * row_bytes<F>(a) + chunk * RUN_BYTES;
            }
        }
        scale = first_scales<F>(a, plan, tile);
#pragma unroll 1
        for (int i = 0; i < PREFETCHED; ++i) prefetch();
    }
    // The rest of the multi-stage buffer; how many stages that are.
    DEVICE int fill() {
#pragma unroll 1
        for (int i = PREFETCHED; i < DEPTH; ++i) prefetch();
        if constexpr (K_TILED && LINES && F::QUANTIZES) ahead();
        return DEPTH - PREFETCHED;
    }
    // Lines of stages to come into L2, a row a lane: memory would rest while activations are staged.
    DEVICE void ahead() const {
        constexpr int STAGES = 4;
        const int left = (k_tile_end() - step + stride - 1) / stride;  // stages of this K tile
#pragma unroll
        for (int i = lane_id() / 16; i < STAGES; i += WARP_SIZE / 16) {
            const int of_tile = tile + (i < left ? 0 : plan.tile_hop),
                      at = i < left ? step + i * stride : k_tile + first + (i - left) * stride;
            const int64_t from = weight_row(a, of_tile, lane_id() % 16);
            if (of_tile < plan.tiles && at < k_tile_end() && from < a.n)
                prefetch_line(static_cast<const char*>(a.w) + from * row_bytes<F>(a) + int64_t(at) * F::STEP_BYTES);
        }
    }
    // To the warp's next stage.
    DEVICE void advance() {
        step += stride;
        if constexpr (K_TILED) {
            while (step >= (F::TILED ? end : k_tile_end()) && tile < plan.tiles) next_k_tile();  // int8 was slower so
        } else if (step >= plan.steps) {
            step = first, hop(1);
        }
    }
    DEVICE int k_tile_end() const { return min(plan.steps, k_tile + plan.k_tile_steps * CLUSTER); }
    DEVICE void next_k_tile() {
        int rounds = 1;
        if (plan.rounds_at_once > 1 && !other && tile + plan.tile_hop < plan.tiles) {
            other = 1;
        } else if (k_tile_end() < plan.steps) {
            rounds = -other, k_tile = k_tile_end(), other = 0;
        } else {
            rounds = plan.rounds_at_once - other, k_tile = 0, other = 0;
        }
        hop(rounds);
        step = k_tile + first, end = k_tile_end();
    }
    DEVICE void hop(int rounds) {
        tile += rounds * plan.tile_hop;
        for (int h = 0; h < (STACKED<F> ? 0 : ROWS_PER_LANE); ++h) {
            if (!F::TILED || h == 0) row[h] += rounds * plan.weight_hop;
            if (!F::TILED) rows[h] += rounds * plan.row_hop;
        }
        if ((F::GROUPS > 0 && !STACKED<F>) || STAGE_SCALE_BYTES<F> > 0) scale += rounds * plan.scale_hop;
    }
    // Starts the loads of the next stage, into the place of the one that was consumed last.
    DEVICE void prefetch() {
        char* into = SHARED_STAGES ? stage_buffer + slot : nullptr;
        const bool there = tile < plan.tiles, second = there && step + 1 < plan.steps;
        if (SHARED_STAGES && !K_TILED && !there)
            return commit_stage();  // zeros in place of no tile would delay the last one's end
        if constexpr (STACKED<F>) copy_from_stack(into, there, second);
        else if (F::TILED || plan.w_aligned) copy(into, there, second);
        else if (there) gather_stage(into);
        if constexpr (F::GROUPS > 0) {
            if constexpr (LATE) tables = table(0);
            else load_tables(into, there, second);
        }
        copy_stage_scales<F>(a, into + TABLES_AT - lane_id() * 16, scale + step / PAIR<F> * 4, tile, there);
        commit_stage();
        advance();
    }
    DEVICE void commit_stage() {
        commit_copies();
        if (SHARED_STAGES)
            slot = slot + STREAM_STAGE_BYTES<F> == DEPTH * STREAM_STAGE_BYTES<F> ? 0 : slot + STREAM_STAGE_BYTES<F>;
    }
    DEVICE const char* table(int u) const {
        return scale + (STACKED<F> ? u ? set_at[PAIR<F> - 1] : set_at[0] : int64_t((step + u) >> a.group_shift)) *
                           TABLE_BYTES<F>;
    }
    DEVICE void load_tables(char* into, bool there, bool second) {
        if constexpr (SHARED_TABLES) {
            // Row pairs by neighbouring lanes, each its step's scales or offsets; all of a pair lie together.
            const int piece = lane_id() >> 3 & 2 * TABLES<F> - 1, u = piece & 1,
                      at = TABLES_AT + (lane_id() & 7) * ROW_TABLES * 4 + piece * SCALE_BYTES<F> - lane_id() * 16;
            if (TABLES<F> > 1 || lane_id() < WARP_SIZE / 2)
                // Without offsets half of the lanes have a piece.
                stream_copy<SCALE_BYTES<F>>(into + at, table(u), u ? second : there);
        } else {
#pragma unroll
            for (int u = 0; u < PAIR<F>; ++u)
                copy_tables(reinterpret_cast<char*>(held[SHARED_STAGES ? 0 : u].scale),
                    reinterpret_cast<char*>(held[SHARED_STAGES ? 0 : u].offset), table(u), u ? second : there);
        }
    }
    DEVICE void copy_tables(char* scales, char* offsets, const char* from, bool there) {
        const int64_t beside = static_cast<const char*>(a.offset) - static_cast<const char*>(a.scale);
#pragma unroll
        for (int pair = 0; pair < SCALE_PAIRS; ++pair) {
            const int at = pair * SCALE_BYTES<F>;
            stream_copy<SCALE_BYTES<F>>(scales + at, from + at, there);
            if (TABLES<F> > 1) stream_copy<SCALE_BYTES<F>>(offsets + at, from + beside + at, there);
        }
    }
    DEVICE char* place(char* into, int u, int h) {
        return SHARED_STAGES ? into + u * WEIGHT_BYTES<F> + h * WARP_SIZE * 16
                             : reinterpret_cast<char*>(&held[SHARED_STAGES ? 0 : u].w[h]);
    }
    // Bytes left of a row.
    DEVICE int room() const {
        return int(row_bytes<F>(a)) - (LINES ? lane_id() % 8 : fragment_quarter()) * RUN_BYTES - step * F::STEP_BYTES;
    }
    // Of lines: where a lane's copy goes, of the half h of the tile's rows; where what it reads of step u lies.
    static DEVICE char* line_place(char* into, int h, int other) {
        return into + h * WEIGHT_BYTES<F> + other * 512 + (lane_id() & 4 ? -1 : 1) * (lane_id() & 8 ? 64 : 0);
    }
    static DEVICE int line_of(int u) {
        return (lane_id() >> 2) * 128 + (lane_id() & 3) * 16 + ((u ^ lane_id() >> 2) & 1) * 64 - lane_id() * 16;
    }
    DEVICE void copy(char* into, bool there, bool second) {
        const int64_t at = int64_t(step) * F::STEP_BYTES;
        const int left = room();
        if constexpr (THREE_BITS<F>) return copy_three_bits<F>(into, held, row[0] + at, there, second);
        if constexpr (SHARED_STAGES && F::TILED && PAIR<F> == 2) {
            const char* from = row[0] + at;
            if constexpr (COMPACT<F>) {
                stream_copy<16>(into, from, there), stream_copy<16, 512>(into, from, there),
                    stream_copy<16, 1024>(into, from, there);
                stream_copy<16, 1536>(into, from, second), stream_copy<16, 2048>(into, from, second),
                    stream_copy<16, 2560>(into, from, second);
                return;
            }
            stream_copy<16>(into, from, there), stream_copy<16, 512>(into, from, there);
            stream_copy<16, 1024>(into, from, second), stream_copy<16, 1536>(into, from, second);
            return;
        }
        if constexpr (LINES) {
#pragma unroll
            for (int h = 0; h < ROWS_PER_LANE; ++h)
#pragma unroll
                for (int other = 0; other < 2; ++other)
                    stream_copy<16>(line_place(into, h, other), row[h] + at + other * COPIED_ROWS * row_bytes<F>(a),
                        there && rows[h] + other * COPIED_ROWS < int(a.n) && left > 0);
            return;
        }
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            const char* from = F::TILED ? row[0] + at + h * 512 : row[h] + at;
            const bool row_there = F::TILED ? there : there && rows[h] < int(a.n);
#pragma unroll
            for (int u = 0; u < PAIR<F>; ++u)
#pragma unroll
                for (int run = 0; run < RUNS; ++run) {
                    const int begin = u * F::STEP_BYTES + run * 32;
                    stream_copy<RUN_BYTES>(place(into, u, h) + run * RUN_BYTES, from + begin,
                        F::TILED ? (u ? second : there) : row_there && begin < left);
                }
        }
        if constexpr (COMPACT<F>) copy_exponents(there, second);
    }
    // Neighbouring steps may be those of two experts.
    DEVICE void copy_from_stack(char* into, bool there, bool second) {
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u) {
            StackPlace at = {0, 0};
            if (u ? second : there) at = place_in_stack(a, plan, tile, step + u);
            set_at[u] = at.set;
            const char* from = row[0] + at.step * F::STEP_BYTES;
#pragma unroll
            for (int h = 0; h < ROWS_PER_LANE; ++h)
                stream_copy<16>(place(into, u, h), from + h * 512, u ? second : there);
        }
    }
    // Exponents of a lane's row where registers hold the weights.
    DEVICE void copy_exponents(bool there, bool second) {
        const int r = fragment_row(0);
        const char* from = row[0] + int64_t(step) * F::STEP_BYTES + 1024 - (r & 8) * 64 + (r & 8);
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u)
            stream_copy<8>(held[SHARED_STAGES ? 0 : u].exponents, from + u * F::STEP_BYTES, u ? second : there);
    }
    DEVICE void gather_stage(char* into) {
        for (int h = 0; h < ROWS_PER_LANE; ++h)
            for (int u = 0; u < PAIR<F>; ++u) {
                const int ahead = LINES ? 0 : u * F::STEP_BYTES, below = LINES ? u * COPIED_ROWS : 0;
                *reinterpret_cast<Words4*>(LINES ? line_place(into, h, u) : place(into, u, h)) =
                    gather<RUN_BYTES>(row[h] + int64_t(step) * F::STEP_BYTES + ahead + below * row_bytes<F>(a),
                        rows[h] + below < int(a.n) ? room() - ahead : 0);
            }
    }
    // The oldest stage; its place takes the next one's loads.
    DEVICE void consume(Slot<F> (&now)[PAIR<F>]) {
        wait_copies<DEPTH>();
        if (LINES || SHARED_TABLES) warp_sync();  // all lanes' copies have come
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u) {
            if constexpr (SHARED_STAGES) read(now[u], stage_buffer + slot + (LINES ? line_of(u) : u * WEIGHT_BYTES<F>));
            else now[u] = held[u];
            if constexpr (LATE)
                copy_tables(
                    reinterpret_cast<char*>(now[u].scale), reinterpret_cast<char*>(now[u].offset), tables, true);
        }
        if constexpr (SHARED_TABLES)
            read_tables(now, stage_buffer + slot + TABLES_AT + (lane_id() >> 2) * ROW_TABLES * 4 - lane_id() * 16);
        read_stage_scales(now[0], stage_buffer + slot + TABLES_AT - lane_id() * 16);
        if (LINES || SHARED_TABLES) warp_sync();  // before others' places take new ones
        prefetch();
    }
    static DEVICE void read(Slot<F>& out, const char* from) {
        if constexpr (THREE_BITS<F>) return read_three_bits<F>(out, from);
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h)
            out.w[h] = *reinterpret_cast<const Words4*>(from + h * (LINES ? WEIGHT_BYTES<F> : WARP_SIZE * 16));
        if constexpr (COMPACT<F>) {
            const Words4 v = *reinterpret_cast<const Words4*>(from + 1024);
#pragma unroll
            for (int i = 0; i < 2 * ROWS_PER_LANE; ++i) out.exponents[i] = word_of(v, i);
        }
    }
    static DEVICE void read_tables(Slot<F> (&now)[PAIR<F>], const char* from) {
        // A shallow multi-stage buffer is that of kernels with many sums, which have no four registers in a row to
        // spare.
        struct alignas(DEPTH <= SHALLOW ? 4 : ROW_TABLES < 4 ? 4 * ROW_TABLES : 16) All {
            uint32_t v[ROW_TABLES];
        };
        const All all = *reinterpret_cast<const All*>(from);
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u)
#pragma unroll
            for (int j = 0; j < F::GROUPS; ++j) {
                now[u].scale[j] = all.v[u * F::GROUPS + j];
                if (TABLES<F> > 1) now[u].offset[j] = all.v[(PAIR<F> + u) * F::GROUPS + j];
            }
    }
};
