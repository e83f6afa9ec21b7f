// Stages activations in shared memory in the weights' 8-bit format, with one scale a token: from the largest magnitude
// over all of K after the norm (dynamic), or the given one (static). L is 127 for int8.
//
//     dynamic   scale = most / L;           q = nearest(x * (L / most)); below 2^-119 zeros and scale 0
//     static    scale = the given one;      q = nearest(x * (1 / scale)), saturated at -L and L
//
// A token with NaN or infinity has scale NaN. A slot is 16 values of K, 16 bytes. A lane keeps its activations in
// registers until the norm's factor and the largest magnitude are known; where they are too many, it reads them again.
#pragma once
#include "norm.h"

// Bytes for eight tokens: the scale of each, and the largest magnitudes that each run of 32 threads has found.
constexpr int ROW_SCALE_BYTES = 8 * (1 + THREADS / 32) * 4;

// For a block that stages the whole rows of all tokens: which slots a thread converts, and how threads exchange partial
// sums and maxima. Part, in cluster_stage.h, is the same for a block of a cluster.
struct WholeRows {
    static constexpr bool CLUSTERED = false;
    // LAP: slots that the threads convert at once. TOKENS: tokens from one of a thread's to its next.
    static constexpr int LAP = THREADS, TOKENS = 1;
    static constexpr int MAXIMA = THREADS / 32;  // partial maxima of a token
    const int mine = threadIdx.x, token = 0;
    DEVICE int slots(const GemvPlan& plan) const { return (plan.steps + 1) / 2 * 8; }  // of a row, in whole stages
    DEVICE int global_piece(int slot) const { return slot; }
    DEVICE void leave(float* moments, int of_token, float partial) const {
        const float sum = run_sum(partial, 32);
        if (threadIdx.x % 32 == 0) moments[of_token * MAXIMA + threadIdx.x / 32] = sum;
    }
    DEVICE void collect(int) const { __syncthreads(); }
    DEVICE void leave_most(uint32_t* maxima, int of_token, uint32_t most) const {
        if (threadIdx.x % 32 == 0) maxima[of_token * MAXIMA + threadIdx.x / 32] = most;
    }
    DEVICE void collect_most(int) const { __syncthreads(); }
};

template <class F, class T, class PART, bool COMMON> struct QuantizedStager : Norms<T, PART::CLUSTERED, COMMON> {
    using Base = Norms<T, PART::CLUSTERED, COMMON>;
    using Base::a, Base::plan, Base::row;
    static constexpr bool BOUNDED = false;
    // Slots that a lane keeps in registers at most; slots that it loads at once.
    static constexpr int IN_REGISTERS = 4, AT_ONCE = PART::CLUSTERED ? 4 : 2;
    static constexpr float LEAST = 0x1p-119f;
    const PART part;
    char* shared;
    Words4 first[2];        // norm weights of a thread's first slot: constants, loaded before the wait
    bool measured = false;  // whether the tokens' scales are known

    DEVICE QuantizedStager(const GemvArgs& a, const GemvPlan& plan, char* shared, const PART& part = PART())
        : Base(a, plan, shared),
          part(part),
          shared(shared) {
        if (!PART::CLUSTERED && a.norm != NORM_NONE)
            for (int h = 0; h < 2; ++h) first[h] = weight(part.mine, h);
    }
    DEVICE float* scales() const { return reinterpret_cast<float*>(shared + plan.block_exponents_at); }
    // Stages `steps` steps of K from step `from` on, padded with zeros to whole stages. Precondition: every thread of
    // the block calls it. It ends with a barrier: the activations are visible to all threads when it returns. again: in
    // a cluster, it overwrites activations that warps may still read, so that a barrier comes first. wait() is called
    // before anything is read; rest() starts further loads once those of the activations have been started.
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, int again, const WAIT& wait, const REST& rest) {
        const int slots = (steps + PAIR<F> - 1) / PAIR<F> * PAIR<F> * (F::KSTEP / 16),
                  items = laps(slots) * tokens_of(int(a.m));
        if (measured) {
            if (PART::CLUSTERED && again) __syncthreads();
            convert(from * (F::KSTEP / 16), slots, false);
        } else {
            measured = true;
            if (Base::layer() || items > IN_REGISTERS || slots < part.slots(plan)) {
                wait();
                measure(part.slots(plan), rest);
                convert(from * (F::KSTEP / 16), slots, a.norm != NORM_NONE);
            } else {
                hold(slots, wait, rest);
            }
        }
        __syncthreads();
    }

private:
    static DEVICE int laps(int slots) { return (slots + PART::LAP - 1) / PART::LAP; }
    // The most tokens that a thread has.
    static DEVICE int tokens_of(int m) { return (m + PART::TOKENS - 1) / PART::TOKENS; }
    DEVICE int place(int slot, int half) const { return part.global_piece(slot) * 16 + half * 8; }
    DEVICE Words4 weight(int slot, int half) const { return Base::weight(place(slot, half)); }
    DEVICE uint32_t* maxima() const { return reinterpret_cast<uint32_t*>(scales() + 8); }
    // Loads eight values, of which the row has `left` more; the others are zero.
    DEVICE Words4 load(const char* from, int left) const {
        if (Base::aligned()) return load_activation16(from, left > 0);
        return left > 0 ? load_part(from, left) : Words4{0, 0, 0, 0};
    }
    // Iterates over the slots of a thread, token by token.
    struct Walk {
        int token, lap = 0;
        int laps;
        DEVICE void next() {
            if (++lap == laps) lap = 0, token += PART::TOKENS;
        }
        DEVICE bool last() const { return lap == laps - 1; }
    };
    DEVICE Walk walk(int slots) const {
        Walk item = {part.token, 0, laps(slots)};
        compute_here(item.token), compute_here(item.laps);  // addresses are computed anew each time, to save registers
        return item;
    }
    DEVICE int slot_of(const Walk& at) const { return at.lap * PART::LAP + part.mine; }

    // Of every eight lanes each has the value of one token.
    DEVICE int my_token() const { return min(lane_id() % 8, int(a.m) - 1); }
    static DEVICE uint32_t magnitudes(const Words4 (&v)[2], uint32_t most) {
        constexpr uint32_t MAGNITUDES = 0x7fff7fffu;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = pair_max(most, word_of(v[i / 4], i % 4) & MAGNITUDES);
        return most;
    }
    DEVICE void leave_most(int token, uint32_t most) const {
        for (int step = 1; step < 32; step *= 2) most = pair_max(most, lane_xor(most, step));
        part.leave_most(maxima(), token, max(most & 0xffffu, most >> 16));
    }
    // The factor for the values of this lane's token. Stores the scales of all tokens for the epilogue. Precondition: a
    // barrier after the last leave_most().
    DEVICE float my_multiplier() const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < PART::MAXIMA; ++i) bits = max(bits, maxima()[my_token() * PART::MAXIMA + i]);
        const float most = T::up(bits);
        const bool large = most >= LEAST;  // no NaN
        float scale = large ? most / F::LARGEST : 0.f, times = large ? F::LARGEST : 0.f, by = large ? most : 1.f;
        if (a.offset) scale = by = *static_cast<const float*>(a.offset), times = 1.f;
        if (threadIdx.x < a.m) scales()[threadIdx.x] = most < INFINITY ? scale : NAN;
        return times / by;
    }
    DEVICE void store(int token, int slot, const Words4 (&raw)[2], float times) const {
        float v[16];
        unpack<T>(raw[0], v), unpack<T>(raw[1], v + 8);
        *reinterpret_cast<Words4*>(shared + token * plan.token_stride + slot * 16) = {F::quantized(v, times),
            F::quantized(v + 4, times), F::quantized(v + 8, times), F::quantized(v + 12, times)};
    }

    // Stages slots that a lane keeps in registers, at most IN_REGISTERS of them.
    template <class WAIT, class REST> DEVICE void hold(int slots, const WAIT& wait, const REST& rest) const {
        const int m = int(a.m);
        Words4 v[IN_REGISTERS][2];
        const char* from[IN_REGISTERS];
        int left[IN_REGISTERS];  // values from there to the row's end; 0 for no slot
        Walk item = walk(slots);
#pragma unroll
        for (int i = 0; i < IN_REGISTERS; ++i, item.next()) {
            const bool there = item.token < m && slot_of(item) < slots;
            const int at = place(slot_of(item), 0);
            from[i] = row(there ? item.token : 0) + at * 2, left[i] = there ? int(a.k) - at : 0;
            compute_here(from[i]), compute_here(left[i]);
        }
        wait();
#pragma unroll
        for (int i = 0; i < IN_REGISTERS; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) v[i][h] = load(from[i] + h * 16, left[i] - h * 8);
        rest();
        if (a.norm != NORM_NONE) {
            float partial = 0.f;
            item = walk(slots);
#pragma unroll
            for (int i = 0; i < IN_REGISTERS; ++i, item.next()) {
                if (item.token >= m) break;
                partial += Base::squares_of(v[i][0]), partial += Base::squares_of(v[i][1]);
                if (item.last()) part.leave(Base::squares(), item.token, partial), partial = 0.f;
            }
            part.collect(m);
            const float my_scale = Base::scale(my_token());
            item = walk(slots);
#pragma unroll
            for (int i = 0; i < IN_REGISTERS; ++i, item.next()) {
                if (item.token >= m) break;
                const float scale = from_lane(my_scale, item.token);
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    v[i][h] =
                        Base::scaled(v[i][h], i == 0 && !PART::CLUSTERED ? first[h] : weight(slot_of(item), h), scale);
            }
        }
        uint32_t most = 0;
        item = walk(slots);
#pragma unroll
        for (int i = 0; i < IN_REGISTERS; ++i, item.next()) {
            if (item.token >= m) break;
            most = magnitudes(v[i], most);
            if (item.last()) leave_most(item.token, most), most = 0;
        }
        part.collect_most(m);
        const float my_times = my_multiplier();
        item = walk(slots);
#pragma unroll
        for (int i = 0; i < IN_REGISTERS; ++i, item.next()) {
            if (item.token >= m) break;
            const float times = from_lane(my_times, item.token);
            if (slot_of(item) < slots) store(item.token, slot_of(item), v[i], times);
        }
    }

    // Loads each of the thread's slots, from slot `from` on, and calls use(at, values).
    template <class REST, class USE> DEVICE void pass(int from, int slots, const REST& rest, const USE& use) const {
        Walk item = walk(slots), to = item;
        bool begun = false;
#pragma unroll 1
        do {
            Words4 v[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, item.next()) {
                const bool there = item.token < int(a.m) && slot_of(item) < slots;
                const int at = place(from + slot_of(item), 0);
                const char* chunk = row(there ? item.token : 0) + at * 2;
#pragma unroll
                for (int h = 0; h < 2; ++h) v[i][h] = load(chunk + h * 16, there ? int(a.k) - at - h * 8 : 0);
            }
            if (!begun) rest();
            begun = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, to.next())
                if (to.token < int(a.m)) use(to, v[i]);
        } while (to.token < int(a.m));
    }
    static DEVICE int nothing() { return 0; }
    // Computes the norm's moments of all tokens over all of K; without a norm their largest magnitudes. It ends with a
    // barrier, after which they are visible to all threads.
    template <class REST> DEVICE void measure(int slots, const REST& rest) const {
        float partial = 0.f;
        const auto add = [&](float* moments, const Walk& at, float more, float and_more) ALWAYS_INLINE {
            partial += more, partial += and_more;
            if (at.last()) part.leave(moments, at.token, partial), partial = 0.f;
        };
        if (Base::layer()) {
            pass(0, slots, rest, [&](const Walk& at, const Words4(&v)[2]) ALWAYS_INLINE {
                add(Base::sums(), at, Base::sum_of(v[0]), Base::sum_of(v[1]));
            });
            part.collect(int(a.m));
            const float my_mean = Base::mean(my_token());
            pass(0, slots, nothing, [&](const Walk& at, const Words4(&v)[2]) ALWAYS_INLINE {
                const float mean = from_lane(my_mean, at.token);
                const int slot = slot_of(at);
                add(Base::squares(), at, Base::squares_of(v[0], place(slot, 0), mean),
                    Base::squares_of(v[1], place(slot, 1), mean));
            });
            part.collect(int(a.m));
            return;
        }
        uint32_t most = 0;
        pass(0, slots, rest, [&](const Walk& at, const Words4(&v)[2]) ALWAYS_INLINE {
            if (a.norm != NORM_NONE) {
                add(Base::squares(), at, Base::squares_of(v[0]), Base::squares_of(v[1]));
            } else {
                most = magnitudes(v, most);
                if (at.last()) leave_most(at.token, most), most = 0;
            }
        });
        if (a.norm != NORM_NONE) part.collect(int(a.m));
        else part.collect_most(int(a.m));
    }
    // Converts slots from slot `from` on. find: a first pass looks for the largest magnitudes of the norm's output.
    DEVICE void convert(int from, int slots, bool find) const {
        const float my_mean = a.norm ? Base::mean(my_token()) : 0.f, my_scale = a.norm ? Base::scale(my_token()) : 0.f;
        float my_times = find ? 0.f : my_multiplier();
        uint32_t most = 0;
#pragma unroll 1
        for (;; find = false) {
            pass(from, slots, nothing, [&](const Walk& at, Words4(&v)[2]) ALWAYS_INLINE {
                const int slot = slot_of(at);
                if (a.norm != NORM_NONE) {
                    const float mean = from_lane(my_mean, at.token), scale = from_lane(my_scale, at.token);
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        v[h] = Base::apply(v[h], weight(from + slot, h), place(from + slot, h), mean, scale);
                }
                const float times = from_lane(my_times, at.token);
                if (find) {
                    most = magnitudes(v, most);
                    if (at.last()) leave_most(at.token, most), most = 0;
                } else if (slot < slots) {
                    store(at.token, slot, v, times);
                }
            });
            if (!find) return;
            part.collect_most(int(a.m));
            my_times = my_multiplier();
        }
    }
};
