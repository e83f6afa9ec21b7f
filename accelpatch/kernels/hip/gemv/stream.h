// Loads weights for the matrix unit through a multi-stage buffer of each warp's own, which needs no block barrier. On
// NVIDIA stages are asynchronous copies into shared memory; on AMD they are loads into registers, one stage ahead.
#pragma once
#include "three_bits.h"

// One lane's part in the loads of its warp, which go through the stages of one tile after another. It branches only at
// the end of a tile, and where there is no tile. The constructor prefetches half of the multi-stage buffer (in clusters
// one stage of int4's deep one, since the kernel before is still reading memory). fill() prefetches the rest after the
// loads of the activations: those are waited for first, and would queue behind all stages.
//
// K_TILED: the block stages activations one K tile at a time. The warp's tiles of two rounds go through one K tile
// before either goes on to the next.
template <class F, int DEPTH, bool K_TILED = false> struct Stream {
    static constexpr int PREFETCHED = K_TILED && F::TILED && DEPTH > CLUSTER_DEPTH ? 1 : (DEPTH + 1) / 2;
    static constexpr int RUNS = F::SPLIT ? 2 : 1, RUN_BYTES = 16 / RUNS;  // of a row's bytes in a step
    // Whether lanes copy whole lines of 128 bytes, eight lanes a line. Chunk c of row r of the tile then lies in the
    // place of step r / 8, swizzled so that the chunks of two rows that are read at once are in different banks.
    // Otherwise each lane copies what it will read itself.
    static constexpr bool LINES = SHARED_STAGES && !F::TILED && !F::SPLIT && PAIR<F> == 2;
    // Rows from one copy of a lane to its next one, within a half of the tile.
    static constexpr int COPIED_ROWS = LINES ? 4 : 1;
    // Whether scales and offsets go through shared memory, of each lane one piece a stage.
    static constexpr bool SHARED_TABLES = SHARED_STAGES && F::GROUPS > 0;
    static_assert(!SHARED_TABLES || PAIR<F> * TABLES<F> * 8 <= WARP_SIZE, "a piece a lane");
    using Stage = Slot<F>[PAIR<F>];
    static constexpr int TABLES_AT = PAIR<F> * WEIGHT_BYTES<F>, ROW_TABLES = PAIR<F> * TABLES<F> * F::GROUPS;
    const GemvArgs& a;
    const GemvPlan& plan;
    const int first, stride;  // in steps: the warp's first stage in a tile, and the distance to the next
    int tile, step;           // of the stage that is prefetched next
    int k_tile = 0, end;      // in steps: where the K tile of that stage begins and ends
    int other = 0;            // 1: its tile is that of the second round in this K tile
    int rows[ROWS_PER_LANE];  // of row-major weights
    const char *row[ROWS_PER_LANE], *scale;
    char* stage_buffer;  // this lane's place in the first stage
    int slot = 0;        // bytes from there to its place in the stage that is written or read next
    Slot<F> in_registers[SHARED_STAGES ? 1 : PAIR<F>];
    static constexpr bool LATE = !SHARED_STAGES && Slot<F>::WORDS * TABLES<F> > 16;  // no registers for tables ahead
    const char* tables;
    int64_t set_at[PAIR<F>];  // in a stack of experts: the sets of scales of the next stage

    // For warp wk of those that share a tile; `tile` is its first. Prefetches the first PREFETCHED stages.
    DEVICE Stream(const GemvArgs& a, const GemvPlan& plan, int wk, int tile, char* stage_buffer)
        : a(a),
          plan(plan),
          first(wk * PAIR<F>),
          stride(PAIR<F> << plan.warps_shift),
          tile(tile),
          step(first),
          stage_buffer(stage_buffer) {
        if (first >= plan.steps) this->tile = plan.tiles;  // this warp has no stage
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
    // Prefetches the rest of the multi-stage buffer; returns how many stages that are.
    DEVICE int fill() {
#pragma unroll 1
        for (int i = PREFETCHED; i < DEPTH; ++i) prefetch();
        if constexpr (K_TILED && LINES && F::QUANTIZES) ahead();
        return DEPTH - PREFETCHED;
    }
    // Prefetches lines of later stages into L2, a row a lane, since memory would idle while activations are staged.
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
    DEVICE void advance() {
        step += stride;
        if constexpr (K_TILED) {
            while (step >= (F::TILED ? end : k_tile_end()) && tile < plan.tiles)
                next_k_tile();  // int8 was slower with `end`
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
    // Starts the loads of the next stage, as one group of copies (an empty one where there is no tile), so that
    // wait_copies() counts stages. Precondition: all lanes have read the stage that it overwrites.
    DEVICE void prefetch() {
        char* into = SHARED_STAGES ? stage_buffer + slot : nullptr;
        const bool there = tile < plan.tiles, second = there && step + 1 < plan.steps;
        if (SHARED_STAGES && !K_TILED && !there)
            return commit_stage();  // copies of zeros would delay the end of the last tile
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
            // Neighbouring lanes copy neighbouring pairs of rows, each of one step and table; a pair's lie together.
            const int piece = lane_id() >> 3 & 2 * TABLES<F> - 1, u = piece & 1,
                      at = TABLES_AT + (lane_id() & 7) * ROW_TABLES * 4 + piece * SCALE_BYTES<F> - lane_id() * 16;
            if (TABLES<F> > 1 || lane_id() < WARP_SIZE / 2)
                // Without offsets half of the lanes have a piece.
                stream_copy<SCALE_BYTES<F>>(into + at, table(u), u ? second : there);
        } else {
#pragma unroll
            for (int u = 0; u < PAIR<F>; ++u)
                copy_tables(reinterpret_cast<char*>(in_registers[SHARED_STAGES ? 0 : u].scale),
                    reinterpret_cast<char*>(in_registers[SHARED_STAGES ? 0 : u].offset), table(u), u ? second : there);
        }
    }
    DEVICE void copy_tables(char* scales, char* offsets, const char* from, bool there) {
        const int64_t offset_from_scale = static_cast<const char*>(a.offset) - static_cast<const char*>(a.scale);
#pragma unroll
        for (int pair = 0; pair < SCALE_PAIRS; ++pair) {
            const int at = pair * SCALE_BYTES<F>;
            stream_copy<SCALE_BYTES<F>>(scales + at, from + at, there);
            if (TABLES<F> > 1) stream_copy<SCALE_BYTES<F>>(offsets + at, from + offset_from_scale + at, there);
        }
    }
    DEVICE char* place(char* into, int u, int h) {
        return SHARED_STAGES ? into + u * WEIGHT_BYTES<F> + h * WARP_SIZE * 16
                             : reinterpret_cast<char*>(&in_registers[SHARED_STAGES ? 0 : u].w[h]);
    }
    // Bytes of a row from this lane's piece of the step to the row's end.
    DEVICE int room() const {
        return int(row_bytes<F>(a)) - (LINES ? lane_id() % 8 : fragment_quarter()) * RUN_BYTES - step * F::STEP_BYTES;
    }
    // With LINES: where a lane's copy for half h of the rows goes; how far from there what it reads of step u lies.
    static DEVICE char* line_place(char* into, int h, int other) {
        return into + h * WEIGHT_BYTES<F> + other * 512 + (lane_id() & 4 ? -1 : 1) * (lane_id() & 8 ? 64 : 0);
    }
    static DEVICE int line_of(int u) {
        return (lane_id() >> 2) * 128 + (lane_id() & 3) * 16 + ((u ^ lane_id() >> 2) & 1) * 64 - lane_id() * 16;
    }
    DEVICE void copy(char* into, bool there, bool second) {
        const int64_t at = int64_t(step) * F::STEP_BYTES;
        const int left = room();
        if constexpr (THREE_BITS<F>) return copy_three_bits<F>(into, in_registers, row[0] + at, there, second);
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
    // As copy() for a stack of experts, where neighbouring steps may belong to two experts.
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
    // Loads the exponents of a lane's row, where the weights are in registers.
    DEVICE void copy_exponents(bool there, bool second) {
        const int r = fragment_row(0);
        const char* from = row[0] + int64_t(step) * F::STEP_BYTES + 1024 - (r & 8) * 64 + (r & 8);
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u)
            stream_copy<8>(in_registers[SHARED_STAGES ? 0 : u].exponents, from + u * F::STEP_BYTES, u ? second : there);
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
    // Takes the oldest stage into `now`, and prefetches another in its place. Where lanes read what others copied, a
    // warp barrier before the reads makes the copies visible, and one after them orders them before the next copies.
    DEVICE void consume(Slot<F> (&now)[PAIR<F>]) {
        wait_copies<DEPTH>();
        if (LINES || SHARED_TABLES) warp_sync();  // all lanes' copies have arrived
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u) {
            if constexpr (SHARED_STAGES) read(now[u], stage_buffer + slot + (LINES ? line_of(u) : u * WEIGHT_BYTES<F>));
            else now[u] = in_registers[u];
            if constexpr (LATE)
                copy_tables(
                    reinterpret_cast<char*>(now[u].scale), reinterpret_cast<char*>(now[u].offset), tables, true);
        }
        if constexpr (SHARED_TABLES)
            read_tables(now, stage_buffer + slot + TABLES_AT + (lane_id() >> 2) * ROW_TABLES * 4 - lane_id() * 16);
        read_stage_scales(now[0], stage_buffer + slot + TABLES_AT - lane_id() * 16);
        if (LINES || SHARED_TABLES) warp_sync();  // all lanes have read the stage that prefetch() overwrites
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
        // Kernels with a shallow buffer have many accumulators, and no four consecutive registers to spare.
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
