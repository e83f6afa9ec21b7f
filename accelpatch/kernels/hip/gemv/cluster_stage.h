// Staging in a block of a cluster: only the activations that its own warps need along K, packed together. A piece is a
// chunk of 8 values (floats) or a slot of 16 (limbs).
//
// A norm's sums are added up in the order of a block without a cluster: the place of a piece among 256 says to which
// thread's sum it would belong there.
#pragma once
#include "arch/mma.h"

template <class F> struct Part {
    static constexpr int PIECE_VALUES = F::QUANTIZES ? 16 : 8, STAGE_PIECES = PAIR<F> * F::KSTEP / PIECE_VALUES;
    static constexpr bool CLUSTERED = true;
    static constexpr int LAP = THREADS / CLUSTER;  // of 256 neighbouring pieces, how many a block stages
    // TOKENS: tokens from one of a thread's to its next. MAXIMA: partial maxima of a token, one for 32 threads' pieces.
    static constexpr int TOKENS = CLUSTER, MAXIMA = CLUSTER * LAP / 32;
    int run, rank;    // run: how many neighbouring pieces a block has
    int mine, token;  // a thread's first piece and first token
    Mbarrier* box;    // for sums of squares, and of quantised tokens for magnitudes
    DEVICE Part(const GemvPlan& plan, int rank, Mbarrier* box)
        : run((STAGE_PIECES << plan.warps_shift) / CLUSTER),
          rank(rank),
          mine(threadIdx.x % LAP),
          token(threadIdx.x / LAP),
          box(box) {}
    // A copy whose values the compiler does not know: what depends on them is computed where it is used, and takes no
    // registers through the whole kernel.
    DEVICE Part afresh() const {
        Part part = *this;
        compute_here(part.run), compute_here(part.mine), compute_here(part.token);
        return part;
    }
    // The place along K of one of the block's pieces, in pieces.
    DEVICE uint32_t global_piece(uint32_t piece) const { return global_piece_of(piece, run, rank); }
    // Sends the sum over 8 threads of a token's sum of squares to every block of the cluster. Precondition: all 8 call
    // it.
    DEVICE void leave(float* moments, int of_token, float partial) const {
        const float sum = run_sum(partial, 8);
        if (threadIdx.x % 8 < CLUSTER)
            send4(moments + of_token * (THREADS / 8) + global_piece(mine) / 8, *box, threadIdx.x % 8, sum);
    }
    // Waits until the partial sums of all blocks have arrived; they are then visible to the caller. Precondition: all
    // threads of the block call it.
    DEVICE void collect(int tokens) const { receive(*box, threadIdx.x == 0, tokens * (THREADS / 8) * 4, 0); }
    // As WholeRows' of quantized_stage.h.
    DEVICE int slots(const GemvPlan& plan) const { return plan.part_steps * (F::KSTEP / PIECE_VALUES); }
    DEVICE void leave_most(uint32_t* maxima, int of_token, uint32_t most) const {
        if (lane_id() < CLUSTER)
            send4(reinterpret_cast<float*>(maxima) + of_token * MAXIMA + (rank * LAP + mine) / 32, box[1], lane_id(),
                bits_to_float(most));
    }
    DEVICE void collect_most(int tokens) const { receive(box[1], threadIdx.x == 0, tokens * MAXIMA * 4, 0); }
};

template <class F, class T> struct ClusterFloats : Norms<T, true, true> {
    using Base = Norms<T, true, true>;
    using Base::a, Base::plan, Base::row;
    static constexpr bool BOUNDED = false;
    const Part<F> part;
    char* shared;

    DEVICE ClusterFloats(const GemvArgs& a, const GemvPlan& plan, char* shared, const Part<F>& part)
        : Base(a, plan, shared),
          part(part),
          shared(shared) {}
    // Stages `steps` of the block's steps from step `from` on; with a norm all of them at once. Precondition: every
    // thread of the block calls it. It ends with a barrier. again: it overwrites activations that warps may still read,
    // so that a barrier comes first. wait, rest: as of FloatStager::range.
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, bool again, const WAIT& wait, const REST& rest) {
        wait();
        if (again) __syncthreads();
        const int pieces = steps * (F::KSTEP / 8);
        copy(from * (F::KSTEP / 8), pieces, rest);
        if (a.norm != NORM_NONE) normalise(pieces);
        __syncthreads();
    }

private:
    DEVICE Words4& chunk(int token, int c) const {
        return *reinterpret_cast<Words4*>(shared + token * plan.token_stride + c * 16);
    }
    template <class REST> DEVICE void copy(int from, int pieces, const REST& rest) const {
#pragma unroll 1
        for (int token = part.token; token < a.m; token += CLUSTER)
#pragma unroll 2
            for (int c = part.mine; c < pieces; c += part.LAP) {
                const int at = part.global_piece(from + c) * 8, left = int(a.k) - at;
                if (Base::aligned()) copy_activation16(&chunk(token, c), row(token) + at * 2, left > 0);
                else chunk(token, c) = load_part(row(token) + at * 2, left);
            }
        commit_copies();
        copies_done(rest());
    }
    DEVICE void normalise(int pieces) const {
        Words4 first[2];  // loaded while the moments are exchanged
        for (int i = 0; i < 2; ++i) first[i] = Base::weight(part.global_piece(part.mine + i * part.LAP) * 8);
#pragma unroll 1
        for (int token = part.token; token < a.m; token += CLUSTER) {
            float partial = 0.f;
            for (int c = part.mine; c < pieces; c += part.LAP) partial += Base::squares_of(chunk(token, c));
            part.leave(Base::squares(), token, partial);
        }
        part.collect(int(a.m));
        const int mine = min(lane_id() % 8, int(a.m) - 1);
        const float my_scale = Base::scale(mine);
#pragma unroll 1
        for (int lap = 0; lap * part.LAP < pieces; ++lap) {
            const int c = lap * part.LAP + part.mine, at = part.global_piece(c) * 8;
            const Words4 g = lap == 0 ? first[0] : lap == 1 ? first[1] : Base::weight(at);
#pragma unroll 2
            for (int token = part.token; token < a.m; token += CLUSTER) {
                const float scale = from_lane(my_scale, token);
                if (c < pieces) chunk(token, c) = Base::scaled(chunk(token, c), g, scale);
            }
        }
    }
};

template <class F, class T> struct ClusterHalves : ClusterFloats<F, T> {
    using Base = ClusterFloats<F, T>;
    using Base::Base;
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, bool again, const WAIT& wait, const REST& rest) {
        Base::range(from, steps, again, wait, rest);
        Halves<F, T>::make(Base::shared, Base::plan, int(Base::a.m), 0, steps * (F::KSTEP / 8));
    }
};

template <class F, class T> struct ClusterLimbs : LimbStager<F, T, false, true, true> {
    using Base = LimbStager<F, T, false, true, true>;
    using Base::a, Base::plan, Base::row;
    static constexpr int AT_ONCE = 4;  // slots that a lane loads at once
    const Part<F> part;

    DEVICE ClusterLimbs(const GemvArgs& a, const GemvPlan& plan, char* shared, const Part<F>& part)
        : Base(a, plan, shared),
          part(part) {}
    // As ClusterFloats'.
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, bool again, const WAIT& wait, const REST& rest) {
        const int pieces = steps * (F::KSTEP / 16), laps = (pieces + part.LAP - 1) / part.LAP;
        typename Base::Extremes extremes;
        if (a.norm == NORM_NONE) extremes = stage(from * (F::KSTEP / 16), pieces, again, wait, rest);
        else fetch(pieces, laps, wait, rest), extremes = normalise(pieces, laps);
        Base::finish(extremes, pieces, 0, from * (F::KSTEP / 16), part.run, part.rank);
    }

private:
    // The place along K of a lane's two chunks, which is computed before the wait.
    DEVICE int chunks_at(uint32_t at, bool there) const {
        int v = there ? int(at) : int(a.k);
        compute_here(v);
        return v;
    }
    template <int APART> DEVICE void load(const char* row, int at, Words4 (&v)[2]) const {
        const char* from = row + uint32_t(at) * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) v[h] = load_activation16(from + h * APART * 2, at + h * APART < int(a.k));
    }
    // Stages slots as two int8 limbs, one token a warp. The exchanges between lanes of several slots overlap.
    template <class WAIT, class REST>
    DEVICE typename Base::Extremes stage(int from, int pieces, bool again, const WAIT& wait, const REST& rest) const {
        const Part<F> part = this->part.afresh();
        const int token = threadIdx.x / WARP_SIZE;
        const bool here = token < int(a.m);
        const char* from_row = row(token);
        compute_here(from_row);
        typename Base::Extremes extremes;
#pragma unroll 1
        for (int first = 0; first < pieces; first += AT_ONCE * WARP_SIZE) {
            Words4 v[AT_ONCE][2];
            uint32_t most[AT_ONCE];
            int slot[AT_ONCE], tokens[AT_ONCE];
            bool there[AT_ONCE];
            int lines[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                slot[j] = first + j * WARP_SIZE + lane_id(), tokens[j] = token, there[j] = here && slot[j] < pieces;
                lines[j] = chunks_at(Base::line_chunk(part.global_piece(from + (slot[j] & ~7)), 0), there[j]);
            }
            if (first == 0) wait();
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) load<64>(from_row, lines[j], v[j]);
            if (first == 0) rest();
            if (first == 0 && again) __syncthreads();
            if (!here) return extremes;
            Base::of_blocks(v, most);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) slot[j] = Base::piece_slot(slot[j]), extremes.see(most[j]);
            Base::template convert<true>(tokens, slot, there, v, most);
        }
        return extremes;
    }
    // Stages slots unchanged and sums their moments: of every CLUSTERth token a thread's own slots.
    template <class WAIT, class REST>
    DEVICE void fetch(int pieces, int laps, const WAIT& wait, const REST& rest) const {
        const Part<F> part = this->part.afresh();
        const int total = laps * ((int(a.m) - part.token + CLUSTER - 1) / CLUSTER);
        int token = part.token, lap = 0, to_token = token, to_lap = 0;
        float partial = 0.f;
#pragma unroll 1
        for (int i = 0; i < max(total, 1); i += AT_ONCE) {  // also where this warp has no token, for wait() and rest()
            Words4 v[AT_ONCE][2];
            const char* from[AT_ONCE];
            int at[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int slot = lap * part.LAP + part.mine;
                from[j] = row(token),
                at[j] = chunks_at(Base::place(part.global_piece(slot), 0), i + j < total && slot < pieces);
                compute_here(from[j]);
                if (++lap == laps) lap = 0, token += CLUSTER;
            }
            if (i == 0) wait();
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) load<Base::HALF>(from[j], at[j], v[j]);
            if (i == 0) rest();
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (i + j >= total) break;
                const int slot = to_lap * part.LAP + part.mine;
                for (int h = 0; h < 2; ++h) {
                    if (slot < pieces) *reinterpret_cast<Words4*>(Base::slot_at(to_token, slot) + h * 16) = v[j][h];
                    partial += Base::squares_of(v[j][h]);
                }
                if (++to_lap < laps) continue;
                part.leave(Base::squares(), to_token, partial);
                partial = 0.f, to_lap = 0, to_token += CLUSTER;
            }
        }
    }
    DEVICE typename Base::Extremes normalise(int pieces, int laps) const {
        constexpr int SIDE = 2;  // tokens that are converted at once
        const Part<F> part = this->part.afresh();
        Words4 first[2];  // loaded while the moments are exchanged
        for (int h = 0; h < 2; ++h) first[h] = Base::weight(Base::place(part.global_piece(part.mine), h));
        part.collect(int(a.m));
        const int mine = min(lane_id() % 8, int(a.m) - 1);
        const float my_scale = Base::scale(mine);
        typename Base::Extremes extremes;
#pragma unroll 1
        for (int lap = 0; lap < laps; ++lap) {
            const int slot = lap * part.LAP + part.mine, global_piece = part.global_piece(slot);
            Words4 g[2];
            for (int h = 0; h < 2; ++h) g[h] = lap ? Base::weight(Base::place(global_piece, h)) : first[h];
#pragma unroll 1
            for (int token = part.token; token < int(a.m); token += CLUSTER * SIDE) {
                Words4 raw[SIDE][2];
                uint32_t most[SIDE];
                int at[SIDE], slots[SIDE];
                bool there[SIDE];
#pragma unroll
                for (int j = 0; j < SIDE; ++j) {
                    at[j] = token + j * CLUSTER, slots[j] = slot, there[j] = slot < pieces && at[j] < int(a.m);
                    const float scale = from_lane(my_scale, at[j]);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        raw[j][h] = {0, 0, 0, 0};
                        if (there[j])
                            raw[j][h] = Base::scaled(
                                *reinterpret_cast<const Words4*>(Base::slot_at(at[j], slot) + h * 16), g[h], scale);
                    }
                }
                Base::of_blocks(raw, most);
                Base::template convert<false>(at, slots, there, raw, most);
#pragma unroll
                for (int j = 0; j < SIDE; ++j) extremes.see(most[j]);
            }
        }
        return extremes;
    }
};

template <class F, class T>
using ClusterStager = std::conditional_t<QUANTIZES_ROWS<F>, QuantizedStager<F, T, Part<F>, true>,
    std::conditional_t<F::QUANTIZES, ClusterLimbs<F, T>,
        std::conditional_t<HALVES<F>, ClusterHalves<F, T>, ClusterFloats<F, T>>>>;
