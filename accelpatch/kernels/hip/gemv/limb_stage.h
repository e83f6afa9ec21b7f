// Stages activations in shared memory as two int8 limbs, in a block that stages all of K. Limbs cannot represent blocks
// of very small values, or values that are not finite; finish() finds and corrects these after all others are staged.
#pragma once
#include "limbs.h"

template <class F, class T, bool NARROW, bool CLUSTERED, bool COMMON>
struct LimbStager : Norms<T, CLUSTERED, COMMON>, Limbs<F, T, NARROW> {
    using Base = Norms<T, CLUSTERED, COMMON>;
    using Form = Limbs<F, T, NARROW>;
    using Base::a, Base::plan;
    using Form::BLOCK, Form::BUMP, Form::SMALL, Form::ZERO, Form::PLAIN_LOW, Form::place, Form::of_blocks,
        Form::exponent, Form::limbs_of, Form::line_chunk, Form::swap;
    using typename Form::Extremes;
    static constexpr int AT_ONCE = 2;  // slots that a thread loads at once
    char* shared;
    Words4 first[2];  // norm weights of a thread's first slot: constants, loaded before the wait for the kernel before
    int origin = 0;   // in a stack of experts: the step of the first slot

    DEVICE LimbStager(const GemvArgs& a, const GemvPlan& plan, char* shared) : Base(a, plan, shared), shared(shared) {
        if (threadIdx.x == 0) Base::shared_word() = 0;
        if (!CLUSTERED && a.norm != NORM_NONE)
            for (int h = 0; h < 2; ++h) first[h] = Base::weight(place(threadIdx.x, h));
        __syncthreads();
    }
    // As FloatStager's.
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, int before, const WAIT& wait, const REST& rest) {
        const int slots = (steps + PAIR<F> - 1) / PAIR<F> * PAIR<F> * (F::KSTEP / 16),
                  laps = (slots + THREADS - 1) / THREADS;
        Extremes extremes;
        if constexpr (STACKED<F>) origin = from - before;
        if (NARROW && !Base::layer() && laps * int(a.m) == 1 && !Base::signalled(from))
            extremes = one_slot(from * F::KSTEP, slots, before * (F::KSTEP / 16), wait, rest);
        else if (a.norm == NORM_NONE)
            extremes = fetch<false>(from * F::KSTEP, slots, laps, before * (F::KSTEP / 16), wait, rest);
        else fetch<true>(0, slots, laps, 0, wait, rest), extremes = normalise(slots, laps);
        finish(extremes, slots, before * (F::KSTEP / 16), from * (F::KSTEP / 16), 0, 0);
    }
    static constexpr bool BOUNDED = true;

protected:
    DEVICE char* slot_at(int token, int slot) const { return shared + token * plan.token_stride + slot * 32; }
    DEVICE float* block_exponents() const { return reinterpret_cast<float*>(shared + plan.block_exponents_at); }
    DEVICE float* group_sums() const { return reinterpret_cast<float*>(shared + plan.sums_at); }
    // Whether lanes load whole lines and then exchange chunks, so that a norm's sums keep their order.
    static constexpr bool FULL_LINES = SHARED_STAGES && F::INTERLEAVED;
    // In a stack of experts: whether the step's expert exists; and a number of the block that begins with this slot,
    // times the expert's routing weight.
    DEVICE bool step_known(int step) const {
        if constexpr (STACKED<F>) return has_expert(plan, step);
        return true;
    }
    DEVICE float weighted(float value, int slot) const {
        if constexpr (STACKED<F>) return value * step_weight(plan, origin + slot / BLOCK);
        return value;
    }
    // The addresses of a lane's chunks of a slot, which are computed before the wait for the kernel before.
    struct Chunks {
        const char* row;
        int at[2];
    };
    DEVICE Chunks chunks(int token, int from, int slot, bool there) const {
        Chunks c = {Base::row(row_of_token<F>(plan, token)), {int(a.k), int(a.k)}};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (there && step_known(from / F::KSTEP + slot / BLOCK))
                c.at[h] = from + (FULL_LINES ? line_chunk(slot, h) : place(slot, h));
            compute_here(c.at[h]);
        }
        compute_here(c.row);
        return c;
    }
    DEVICE void load(const Chunks& c, Words4 (&v)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) v[h] = load_chunk(c.row, c.at[h], int(a.k), Base::aligned());
    }
    template <int COUNT> static DEVICE bool all_arrived(const Words4 (&v)[COUNT][2]) {
        bool all = true;
#pragma unroll
        for (const auto& slot : v) all = all && !is_sentinel(slot[0]) && !is_sentinel(slot[1]);
        return all;
    }
    // Loads a thread's values of every token into their slots. Without a norm they are converted to limbs; with one
    // they are stored unchanged, and their moments are summed. `wait` waits for the kernel before, after the first
    // addresses are known; `rest` runs after the first loads have started.
    template <bool NORM, class WAIT, class REST>
    DEVICE Extremes fetch(int from, int slots, int laps, int before, const WAIT& wait, const REST& rest) const {
        const int total = laps * int(a.m);
        int token = 0, lap = 0, to_token = 0, to_lap = 0;
        float partial = 0.f;
        Extremes extremes;
#pragma unroll 1
        for (int i = 0; i < total; i += AT_ONCE) {
            Words4 v[AT_ONCE][2];
#pragma unroll 1
            for (int looks = 0;; spin(looks)) {
                Chunks c[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    const int slot = lap * THREADS + threadIdx.x;
                    c[j] = chunks(token, from, slot, i + j < total && slot < slots);
                    if (++lap == laps) lap = 0, ++token;
                }
                if (i == 0 && looks == 0) wait();
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) load(c[j], v[j]);
                if (i == 0 && looks == 0) rest();
                if (NORM || !NARROW || !Base::signalled(from / F::KSTEP) || all_arrived(v)) break;
                token = to_token, lap = to_lap;
            }
            if constexpr (FULL_LINES)
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) swap(v[j]);
            uint32_t most[AT_ONCE];
            if constexpr (!NORM) of_blocks(v, most);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (i + j >= total) break;
                const int slot = to_lap * THREADS + threadIdx.x;
                if constexpr (NORM) {
                    for (int h = 0; h < 2; ++h) {
                        if (slot < slots) *reinterpret_cast<Words4*>(slot_at(to_token, slot) + h * 16) = v[j][h];
                        partial += Base::layer() ? Base::sum_of(v[j][h]) : Base::squares_of(v[j][h]);
                    }
                    if (to_lap == laps - 1)
                        Base::leave(Base::layer() ? Base::sums() : Base::squares(), to_token, partial), partial = 0.f;
                } else {
                    convert<false, 1>({to_token}, {before + slot}, {slot < slots}, {{v[j][0], v[j][1]}}, {most[j]});
                    extremes.see(most[j]);
                }
                if (++to_lap == laps) to_lap = 0, ++to_token;
            }
        }
        return extremes;
    }
    // As fetch and normalise, where a thread has one slot. Precondition: no producer flag covers these columns, so that
    // one load after the wait is enough. With an RMSNorm the values stay in registers until its factor is known.
    template <class WAIT, class REST>
    DEVICE Extremes one_slot(int from, int slots, int before, const WAIT& wait, const REST& rest) const {
        const int slot = threadIdx.x;
        Words4 v[1][2];
        const Chunks c = chunks(0, from, slot, slot < slots);
        wait();
        load(c, v[0]);
        rest();
        if constexpr (FULL_LINES) swap(v[0]);
        if (a.norm != NORM_NONE) {
            Base::leave(Base::squares(), 0, Base::squares_of(v[0][0]) + Base::squares_of(v[0][1]));
            __syncthreads();
            const float scale = Base::scale(0);
#pragma unroll
            for (int h = 0; h < 2; ++h) v[0][h] = Base::scaled(v[0][h], first[h], scale);
        }
        Extremes extremes;
        extremes.see(convert_one(0, before + slot, slot < slots, v));
        return extremes;
    }
    DEVICE Extremes normalise(int slots, int laps) const {
        Extremes extremes;
        __syncthreads();
        if (Base::layer()) deviations(slots);
        const int mine = min(lane_id() % 8, int(a.m) - 1);
        const float my_mean = Base::mean(mine), my_scale = Base::scale(mine);
#pragma unroll 1
        for (int lap = 0; lap < laps; ++lap) {
            const int slot = lap * THREADS + threadIdx.x;
            Words4 g[2];
            for (int h = 0; h < 2; ++h) g[h] = lap ? Base::weight(place(slot, h)) : first[h];
#pragma unroll 1
            for (int token = 0; token < a.m; ++token) {
                const float mean = from_lane(my_mean, token), scale = from_lane(my_scale, token);
                Words4 raw[1][2] = {{{0, 0, 0, 0}, {0, 0, 0, 0}}};
                if (slot < slots)
                    for (int h = 0; h < 2; ++h)
                        raw[0][h] = Base::apply(*reinterpret_cast<const Words4*>(slot_at(token, slot) + h * 16), g[h],
                            place(slot, h), mean, scale);
                extremes.see(convert_one(token, slot, slot < slots, raw));
            }
        }
        return extremes;
    }
    DEVICE void deviations(int slots) const {
#pragma unroll 1
        for (int token = 0; token < a.m; ++token) {
            const float mean = Base::mean(token);
            float partial = 0.f;
            for (int slot = threadIdx.x; slot < slots; slot += THREADS)
                for (int h = 0; h < 2; ++h)
                    partial += Base::squares_of(
                        *reinterpret_cast<const Words4*>(slot_at(token, slot) + h * 16), place(slot, h), mean);
            Base::leave(Base::squares(), token, partial);
        }
        __syncthreads();
    }
    // Ends the staging. Precondition: every thread of the block calls it. It has a barrier: after it the activations
    // are visible to all threads. Blocks that limbs cannot represent are rare, and corrected here, where few registers
    // are in use. `slots` slots were staged behind `before` others; they begin with slot `from` of the thread block's
    // part of K, see global_piece_of.
    DEVICE void finish(const Extremes& extremes, int slots, int before, int from, int run, int rank) const {
        if (!block_any(extremes.odd(), Base::shared_word())) return;
        look(slots, before, from, run, rank);
        __syncthreads();
    }
    // Corrects blocks, one thread a block. One of very small values is multiplied by 2^64, which is exact. One with a
    // value that is not finite gets NaN as block exponent: its token's sums become NaN, and the epilogue recomputes
    // them.
    DEVICE void look(int slots, int before, int from, int run, int rank) const {
        constexpr int SUMS = SUMMED<F> ? F::GROUPS : 1, VALUES = BLOCK * 16;
        int first = threadIdx.x;
        compute_here(first);  // keeps the compiler from computing any of this earlier
#pragma unroll 1
        for (int i = first; i < slots / BLOCK * int(a.m); i += THREADS) {
            const int token = i % int(a.m), slot = i / int(a.m) * BLOCK;
            const float mean = a.norm ? Base::mean(token) : 0.f, factor = a.norm ? Base::scale(token) : 0.f;
            const auto value = [&](int at, int e) ALWAYS_INLINE {
                const int k = place(global_piece_of(from + slot + at / 16, run, rank), at / 8 % 2) + e;
                return k < int(a.k) && step_known((from + slot) / BLOCK)
                           ? Base::value(row_of_token<F>(plan, token), k, mean, factor)
                           : 0.f;
            };
            uint32_t most = 0;
#pragma unroll 1
            for (int at = 0; at < VALUES; ++at) most = max(most, float_to_bits(value(at, at % 8)) & 0x7fffffffu);
            float& worth = block_exponents()[(before + slot) / BLOCK * 8 + token];
            if (most >= 0x7f800000u) worth = NAN;
            const uint32_t biased_exponent = (most + BUMP) >> 23;
            if (most == 0 || biased_exponent >= SMALL) continue;
            const float times = bits_to_float((204 - biased_exponent) << 23),
                        block_exponent = bits_to_float((biased_exponent + 50) << 23) * 0x1p-64f;
#pragma unroll 1
            for (int group = 0; group < SUMS; ++group) {
                int sum = 0;
#pragma unroll 1
                for (int j = 0; j < VALUES / SUMS; ++j) {
                    const int at =
                        SUMS < 4 ? group * (VALUES / SUMS) + j : group / 2 * 64 + j / 8 * 16 + group % 2 * 8 + j % 8;
                    const uint32_t q =
                        float_to_bits(fmaf(value(at, F::order(at % 8)) * 0x1p64f, times, bits_to_float(ZERO)));
                    char* to = slot_at(token, before + slot + at / 16) + at % 16;
                    to[0] = static_cast<char>(q >> 8), to[16] = static_cast<char>(q ^ (PLAIN_LOW ? 0 : 0x80));
                    sum += int(q - ZERO);
                }
                if (SUMMED<F>)
                    group_sums()[((before + slot) / BLOCK * SUMS + group) * 8 + token] =
                        weighted(float(sum) * block_exponent, before + slot);
            }
            worth = weighted(block_exponent * F::CODE_STEP, before + slot);
        }
    }
    // Converts slots to two int8 limbs and stores them. most: the largest magnitude of each slot's block. The exchanges
    // between lanes of all slots come first and overlap, and the stores after them. PIECES: a lane has the chunks of
    // lines, as they were loaded.
    template <bool PIECES, int COUNT>
    DEVICE void convert(const int (&token)[COUNT], const int (&slot)[COUNT], const bool (&there)[COUNT],
        const Words4 (&raw)[COUNT][2], const uint32_t (&most)[COUNT]) const {
        float block_exponent[COUNT];
        uint32_t words[COUNT][2][4];  // of each chunk two of high bytes, two of low ones
        int sums[COUNT][2];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const uint32_t biased_exponent = exponent(most[j]);
            block_exponent[j] = bits_to_float((biased_exponent - 14) << 23);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sums[j][h] = limbs_of(raw[j][h], bits_to_float((268 - biased_exponent) << 23), words[j][h]);
        }
        using Of = typename Form::template GroupSums<PIECES>;
        if constexpr (SUMMED<F>) Of::add_up(sums);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            if (!there[j]) continue;
            char* at = slot_at(token[j], slot[j]);
            const auto& [first, last] = words[j];
            if constexpr (PIECES) {
                at += Form::piece_half() * 8;
                Form::put(at, first[0], first[1]), Form::put(at + 16, first[2], first[3]);
                Form::put(at + 128, last[0], last[1]), Form::put(at + 144, last[2], last[3]);
            } else {
                *reinterpret_cast<Words4*>(at) = {first[0], first[1], last[0], last[1]},
                *reinterpret_cast<Words4*>(at + 16) = {first[2], first[3], last[2], last[3]};
            }
            if (lane_id() % Of::LANES) continue;
            if (lane_id() % BLOCK == 0)
                block_exponents()[slot[j] / BLOCK * 8 + token[j]] = weighted(block_exponent[j] * F::CODE_STEP, slot[j]);
            if (!SUMMED<F>) continue;
#pragma unroll
            for (int h = 0; h < Of::KEPT; ++h)
                group_sums()[Of::place(slot[j], h) * 8 + token[j]] =
                    weighted(float(sums[j][h]) * block_exponent[j], slot[j]);
        }
    }
    DEVICE uint32_t convert_one(int token, int slot, bool there, Words4 (&raw)[1][2]) const {
        uint32_t most[1];
        of_blocks(raw, most);
        convert<false, 1>({token}, {slot}, {there}, raw, most);
        return most[0];
    }
};
