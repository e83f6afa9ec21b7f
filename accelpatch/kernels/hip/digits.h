// Activations as 16-bit integers for the integer products: blocks of 128 values of K share a power of two, chosen so that
// the largest magnitude of a block has 15 bits. An integer is two signed bytes, high * 256 + low. Where a block's values lie
// within 2^7 of each other, bf16 loses nothing; what is lost is at most 2^-16 of the largest.
//
// Shared memory holds slots of 16 values: 16 high bytes, then the low ones. Slot s of a row is chunks 2 s and 2 s + 1, or,
// interleaved, chunks 8 (s / 4) + s % 4 and that + 4; eight neighbouring slots are a block. Before a slot is converted it
// holds its own values.
#pragma once
#include "norm.h"

static __device__ __noinline__ Words4 scaled_up(Words4 values, float by) {  // of bf16
    float v[8];
    unpack<Bf16>(values, v);
#pragma unroll
    for (float& one : v) one *= by;
    return pack<Bf16>(v);
}

template <class F, class T, bool NARROW, bool CLUSTERED, bool COMMON> struct DigitStager : Norms<T, CLUSTERED, COMMON> {
    using Base = Norms<T, CLUSTERED, COMMON>;
    using Base::a, Base::plan, Base::row;
    static constexpr int AT_ONCE = NARROW ? 3 : 2;  // slots under way at once
    static constexpr int BLOCK = 8;         // slots that share a power
    static constexpr uint32_t ZERO = 0x4b400080u;  // of a float whose low bytes are the digits, the lowest plus 128: 1.5 * 2^23 + 0x80
    static constexpr uint32_t BUMP = 0x10000u;     // what rounds to 2^15 or more takes the next power
    static constexpr int SMALL = 64;               // exponents (biased) below it are lifted by 2^64
    char* shared;
    Words4 first[2];  // the norm's weights of a thread's first slot: constant, and so loaded before the wait

    DEVICE DigitStager(const GemvArgs& a, const GemvPlan& plan, char* shared) : Base(a, plan, shared), shared(shared) {
        if (threadIdx.x == 0) Base::votes() = 0;
        if (!CLUSTERED && a.norm != NORM_NONE)
            for (int h = 0; h < 2; ++h) first[h] = Base::weight(place(threadIdx.x, h));
        __syncthreads();
    }
    // As FloatStager's.
    template <class REST> DEVICE void range(int from, int steps, int before, const REST& rest) {
        const int slots = (steps + PAIR<F> - 1) / PAIR<F> * PAIR<F> * (F::KSTEP / 16), laps = (slots + THREADS - 1) / THREADS;
        if (a.norm == NORM_NONE) fetch<false>(from * F::KSTEP, slots, laps, before * (F::KSTEP / 16), rest);
        else if (NARROW && !Base::layer() && laps * int(a.m) == 1) one_slot(slots, rest);
        else fetch<true>(0, slots, laps, 0, rest), normalise(slots, laps);
        __syncthreads();
    }
    static constexpr bool BOUNDED = true;
    // Whether a token has a value that is not finite: no integer is.
    DEVICE bool unbounded(int token) const { return Base::votes() >> token & 1u; }

protected:
    DEVICE char* slot_at(int token, int slot) const { return shared + token * plan.token_stride + slot * 32; }
    DEVICE float* powers() const { return reinterpret_cast<float*>(shared + plan.powers_at); }
    DEVICE float* group_sums() const { return reinterpret_cast<float*>(shared + plan.sums_at); }
    // Where in K the first or last half of a slot begins.
    static constexpr int HALF = F::INTERLEAVED ? 32 : 8;  // from the first half to the last
    static DEVICE int place(uint32_t slot, int half) { return 8 * (F::INTERLEAVED ? slot + (slot & ~3u) : 2 * slot) + half * HALF; }
    // A block's eight lanes may load its two lines whole, a chunk of each, and then exchange halves: lane i of them has slot i, or,
    // not interleaved, slot i / 2 or that + 4.
    static constexpr int MATE = F::INTERLEAVED ? 4 : 1;
    static DEVICE uint32_t line_chunk(uint32_t slot, int line) { return (slot & ~7u) * 16 + (threadIdx.x & 7) * 8 + line * 64; }
    static DEVICE int swapped(int slot) { return F::INTERLEAVED ? slot : (slot & ~7) + (slot >> 1 & 3) + (slot & 1) * 4; }
    static DEVICE void swap(Words4 (&v)[2]) {
        const bool last = threadIdx.x & MATE;
        const Words4 give = last ? v[0] : v[1], taken = {lane_xor(give.x, MATE), lane_xor(give.y, MATE), lane_xor(give.z, MATE), lane_xor(give.w, MATE)};
        v[0] = last ? taken : v[0], v[1] = last ? v[1] : taken;
    }
    // This stager's do where each has its own slot then, so that a norm's sums keep their order; those of clusters do always.
    static constexpr bool WHOLE_LINES = SHARED_RING && F::INTERLEAVED;
    DEVICE void load(int token, int from, int slot, bool there, Words4 (&v)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            v[h] = {0, 0, 0, 0};
            if (there) v[h] = Base::load(token, from + (WHOLE_LINES ? line_chunk(slot, h) : place(slot, h)));
        }
    }
    // A thread's own values of every token into their slots: as digits, or for a norm as they are, with its moments.
    template <bool NORM, class REST> DEVICE void fetch(int from, int slots, int laps, int before, const REST& rest) const {
        const int total = laps * int(a.m);
        int token = 0, lap = 0, to_token = 0, to_lap = 0;
        float share = 0.f;
#pragma unroll 1
        for (int i = 0; i < total; i += AT_ONCE) {
            Words4 v[AT_ONCE][2];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int slot = lap * THREADS + threadIdx.x;
                load(token, from, slot, i + j < total && slot < slots, v[j]);
                if (++lap == laps) lap = 0, ++token;
            }
            if (i == 0) rest();
            if constexpr (WHOLE_LINES)
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) swap(v[j]);
            uint32_t most[AT_ONCE];
            if constexpr (!NORM) of_blocks(v, most), lift(v, most);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (i + j >= total) break;
                const int slot = to_lap * THREADS + threadIdx.x;
                if constexpr (NORM) {
                    for (int h = 0; h < 2; ++h) {
                        if (slot < slots) *reinterpret_cast<Words4*>(slot_at(to_token, slot) + h * 16) = v[j][h];
                        share += Base::layer() ? Base::sum_of(v[j][h]) : Base::squares_of(v[j][h]);
                    }
                    if (to_lap == laps - 1) Base::leave(Base::layer() ? Base::sums : Base::squares(), to_token, share), share = 0.f;
                } else {
                    vote(convert<1>({to_token}, {before + slot}, {slot < slots}, {{v[j][0], v[j][1]}}, {most[j]}));
                }
                if (++to_lap == laps) to_lap = 0, ++to_token;
            }
        }
    }
    // Under an RMSNorm, a slot a thread: its values wait in registers for the norm's factor.
    template <class REST> DEVICE void one_slot(int slots, const REST& rest) const {
        const int slot = threadIdx.x;
        Words4 v[1][2];
        load(0, 0, slot, slot < slots, v[0]);
        rest();
        if constexpr (WHOLE_LINES) swap(v[0]);
        Base::leave(Base::squares(), 0, Base::squares_of(v[0][0]) + Base::squares_of(v[0][1]));
        __syncthreads();
        const float scale = Base::scale(0);
#pragma unroll
        for (int h = 0; h < 2; ++h) v[0][h] = Base::scaled(v[0][h], first[h], scale);
        vote(convert_one(0, slot, slot < slots, v));
    }
    DEVICE void normalise(int slots, int laps) const {
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
                    for (int h = 0; h < 2; ++h) raw[0][h] = Base::apply(*reinterpret_cast<const Words4*>(slot_at(token, slot) + h * 16), g[h], place(slot, h), mean, scale);
                vote(convert_one(token, slot, slot < slots, raw));
            }
        }
    }
    DEVICE void deviations(int slots) const {
#pragma unroll 1
        for (int token = 0; token < a.m; ++token) {
            const float mean = Base::mean(token);
            float share = 0.f;
            for (int slot = threadIdx.x; slot < slots; slot += THREADS)
                for (int h = 0; h < 2; ++h) share += Base::squares_of(*reinterpret_cast<const Words4*>(slot_at(token, slot) + h * 16), place(slot, h), mean);
            Base::leave(Base::squares(), token, share);
        }
        __syncthreads();
    }
    // The largest magnitude of eight values, as bits of their dtype.
    static DEVICE uint32_t largest(const Words4& v) {
        const uint32_t most = pair_max(pair_max(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu), pair_max(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu));
        return max(most & 0xffffu, most >> 16);
    }
    // The largest magnitude of each slot's block; every lane of a block calls it. Together: each step waits for the one before.
    template <int COUNT> static DEVICE void of_blocks(const Words4 (&raw)[COUNT][2], uint32_t (&most)[COUNT]) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) most[j] = max(largest(raw[j][0]), largest(raw[j][1]));
#pragma unroll
        for (int step = 1; step < BLOCK; step *= 2)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) most[j] = max(most[j], lane_xor(most[j], step));
    }
    static DEVICE uint32_t exponent(uint32_t most) { return (float_to_bits(T::up(most)) + BUMP) >> 23; }
    // Values of very small blocks times 2^64: exact, and rare.
    template <int COUNT> static DEVICE void lift(Words4 (&raw)[COUNT][2], const uint32_t (&most)[COUNT]) {
        if constexpr (T::BF16) {
            bool any = false;
#pragma unroll
            for (int j = 0; j < COUNT; ++j) any = any || (most[j] && exponent(most[j]) < SMALL);
            if (!any) return;
#pragma unroll
            for (int i = 0; i < COUNT * 2; ++i) {
                raw[i / 2][i % 2] = scaled_up(raw[i / 2][i % 2], exponent(most[i / 2]) < SMALL ? 0x1p64f : 1.f);
            }
        }
    }
    // Bits of the tokens that are not finite.
    DEVICE void vote(uint32_t tokens) const {
        if (tokens) atomicOr(&Base::votes(), tokens);
    }
    // Slots' values as digits; the bits of tokens whose values are not finite. `most`: the largest magnitudes of the slots' blocks, whose
    // values have been lifted. What waits for other lanes goes side by side, and no store comes between.
    template <int COUNT>
    DEVICE uint32_t convert(const int (&token)[COUNT], const int (&slot)[COUNT], const bool (&there)[COUNT], const Words4 (&raw)[COUNT][2], const uint32_t (&most)[COUNT]) const {
        float power[COUNT];
        Words4 high[COUNT], low[COUNT];
        int sums[COUNT][2];
        uint32_t bad = 0;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const bool lifted = exponent(most[j]) < SMALL;
            const uint32_t held = exponent(most[j]) + (lifted ? 64 : 0);
            power[j] = bits_to_float((held - 14) << 23) * (lifted ? 0x1p-64f : 1.f);
            digits_of(raw[j], bits_to_float((268 - held) << 23), high[j], low[j], sums[j]);
            bad |= there[j] && float_to_bits(T::up(most[j])) >= 0x7f800000u ? 1u << token[j] : 0u;
        }
        if constexpr (F::OFFSET != OFFSET_NONE) add_up(sums);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            if (!there[j]) continue;
            char* at = slot_at(token[j], slot[j]);
            *reinterpret_cast<Words4*>(at) = high[j], *reinterpret_cast<Words4*>(at + 16) = low[j];
            if (slot[j] % BLOCK == 0) powers()[slot[j] / BLOCK * 8 + token[j]] = power[j] * F::UNIT;
            if (F::OFFSET == OFFSET_NONE || slot[j] % SUMMED) continue;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) group_sums()[(slot[j] / SUMMED * HALVES + h) * 8 + token[j]] = float(sums[j][h]) * power[j];
        }
        return bad;
    }
    DEVICE uint32_t convert_one(int token, int slot, bool there, Words4 (&raw)[1][2]) const {
        uint32_t most[1];
        of_blocks(raw, most), lift(raw, most);
        return convert<1>({token}, {slot}, {there}, raw, most);
    }
    // A slot's words, and the sums of its two chunks.
    static DEVICE void digits_of(const Words4 (&raw)[2], float times, Words4& high, Words4& low, int (&sums)[2]) {
        uint32_t words[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float v[8];
            uint32_t q[8];
            unpack<T>(raw[h], v);
            uint32_t sum = 0u - 8u * ZERO;
#pragma unroll
            for (int e = 0; e < 8; ++e) q[e] = float_to_bits(fmaf(v[F::order(e)], times, bits_to_float(ZERO))), sum += q[e];
            sums[h] = int(sum);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint32_t a = permute<0x5140>(q[4 * part], q[4 * part + 1]), b = permute<0x5140>(q[4 * part + 2], q[4 * part + 3]);
                words[0][2 * h + part] = permute<0x7632>(a, b), words[1][2 * h + part] = permute<0x5410>(a, b) ^ 0x80808080u;
            }
        }
        high = {words[0][0], words[0][1], words[0][2], words[0][3]}, low = {words[1][0], words[1][1], words[1][2], words[1][3]};
    }
    // A group's sum of activations: of SUMMED slots, or of the same half of them.
    static constexpr int SUMMED = F::GROUPS == 1 ? 8 : 4, HALVES = F::GROUPS == 4 ? 2 : 1;
    template <int COUNT> static DEVICE void add_up(int (&sums)[COUNT][2]) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (HALVES == 1) sums[j][0] += sums[j][1];
#pragma unroll
        for (int step = 1; step < SUMMED; step *= 2)
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) sums[j][h] += lane_xor(sums[j][h], step);
    }
};
