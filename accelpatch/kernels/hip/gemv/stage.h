// Stages float activations in shared memory, in chunks of 8 values, and applies the norm.
#pragma once
#include "norm.h"

template <class F, class T, bool COMMON> struct FloatStager : Norms<T, false, COMMON> {
    using Base = Norms<T, false, COMMON>;
    using Base::a, Base::plan, Base::row;
    char* shared;
    Words4 first[2];  // norm weights of a thread's first chunks: constants, loaded before the wait

    DEVICE FloatStager(const GemvArgs& a, const GemvPlan& plan, char* shared) : Base(a, plan, shared), shared(shared) {
        if (a.norm != NORM_NONE)
            for (int i = 0; i < 2; ++i) first[i] = Base::weight((threadIdx.x + i * THREADS) * 8);
    }
    // Stages `steps` steps of K from step `from` on, padded with zeros to whole stages, after `before` steps that are
    // staged already. With a norm all of K is staged at once. Precondition: every thread of the block calls it. It ends
    // with a barrier: the activations are visible to all threads when it returns. wait() is called before anything is
    // read; rest() starts further loads once those of the activations have been started, and returns their stages.
    template <class WAIT, class REST>
    DEVICE void range(int from, int steps, int before, const WAIT& wait, const REST& rest) {
        const int wanted = (steps + PAIR<F> - 1) / PAIR<F> * PAIR<F> * (F::KSTEP / 8);
        if (SHARED_STAGES && (a.norm == NORM_RMS || a.norm == NORM_RMS_PLUS_ONE) && a.m == 1 && wanted <= 2 * THREADS) {
            two_chunks(wanted, wait, rest);
        } else if (before) {
            add(from * F::KSTEP, wanted, before * (F::KSTEP / 8));
        } else {
            wait();
            copy(from * F::KSTEP, wanted, rest, Base::signalled(from));
            if (a.norm != NORM_NONE) normalise(wanted);
        }
        __syncthreads();
    }
    static constexpr bool BOUNDED = false;

private:
    DEVICE Words4& chunk(int token, int c) const {
        return *reinterpret_cast<Words4*>(shared + token * plan.token_stride + c * 16);
    }
    // Copies a thread's own chunks of every token. signalled: they may still be SENTINEL, and are then loaded again.
    template <class REST> DEVICE void copy(int from, int wanted, const REST& rest, bool signalled) const {
#pragma unroll 1
        for (int token = 0; token < a.m; ++token)
#pragma unroll 2
            for (int c = threadIdx.x; c < wanted; c += THREADS) {
                const int at = from + c * 8, left = int(a.k) - at;
                if (Base::aligned()) copy_activation16(&chunk(token, c), row(token) + at * 2, left > 0);
                else chunk(token, c) = load_part(row(token) + at * 2, left);
            }
        commit_copies();
        copies_done(rest());
        if (!signalled) return;
        int looks = 0;
#pragma unroll 1
        for (int c = threadIdx.x; c < wanted; c += THREADS)
            for (; is_sentinel(chunk(0, c)); chunk(0, c) = Base::load(0, from + c * 8)) spin(looks);
    }
    // The same after `before` chunks, through registers: waiting for asynchronous copies would wait for the weights'
    // too.
    DEVICE void add(int from, int wanted, int before) const {
#pragma unroll 1
        for (int token = 0; token < a.m; ++token) {
            for (int c = threadIdx.x; c < wanted; c += 2 * THREADS) {
                const Words4 v = Base::load(token, from + c * 8);
                const int other = c + THREADS;
                if (other < wanted) chunk(token, before + other) = Base::load(token, from + other * 8);
                chunk(token, before + c) = v;
            }
        }
    }
    // The same with an RMSNorm and up to two chunks a thread, which stay in registers until the norm's factor is known.
    template <class WAIT, class REST> DEVICE void two_chunks(int wanted, const WAIT& wait, const REST& rest) const {
        Words4 v[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        wait();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (const int c = threadIdx.x + i * THREADS; c < wanted) v[i] = Base::load(0, c * 8);
        rest();
        Base::leave(Base::squares(), 0, Base::squares_of(v[0]) + Base::squares_of(v[1]));
        __syncthreads();
        const float scale = Base::scale(0);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (const int c = threadIdx.x + i * THREADS; c < wanted) chunk(0, c) = Base::scaled(v[i], first[i], scale);
    }
    DEVICE void normalise(int wanted) const {
        if (Base::layer()) {
            for (int token = 0; token < a.m; ++token) {
                float partial = 0.f;
                for (int c = threadIdx.x; c < wanted; c += THREADS) partial += Base::sum_of(chunk(token, c));
                Base::leave(Base::sums(), token, partial);
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int token = 0; token < a.m; ++token) {
            const float mean = Base::mean(token);
            float partial = 0.f;
            for (int c = threadIdx.x; c < wanted; c += THREADS)
                partial += Base::squares_of(chunk(token, c), c * 8, mean);
            Base::leave(Base::squares(), token, partial);
        }
        __syncthreads();
        const int mine = lane_id() % 8 < a.m ? lane_id() % 8 : 0;
        const float my_mean = Base::mean(mine), my_scale = Base::scale(mine);
        const int end = (wanted + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE;  // whole warps, for from_lane
#pragma unroll 1
        for (int c = threadIdx.x, i = 0; c < end; c += THREADS, ++i) {
            const Words4 g = i == 0 ? first[0] : i == 1 ? first[1] : Base::weight(c * 8);
#pragma unroll 2
            for (int token = 0; token < a.m; ++token) {
                const float mean = from_lane(my_mean, token), scale = from_lane(my_scale, token);
                if (c < wanted) chunk(token, c) = Base::apply(chunk(token, c), g, c * 8, mean, scale);
            }
        }
    }
};
