// Activations into shared memory: copy, norm, sums a group. One token's result never depends on another's, nor on M.
#pragma once
#include "group_sums.h"

template <class T> DEVICE Words4 pack(const float* v) {
    return {T::down_pair(v[0], v[1]), T::down_pair(v[2], v[3]), T::down_pair(v[4], v[5]), T::down_pair(v[6], v[7])};
}
// Eight 16-bit values from element `at` of a row of `k`; zeros past its end.
DEVICE Words4 load_chunk(const void* row, int64_t at, int64_t k, bool aligned) {
    const char* from = static_cast<const char*>(row) + at * 2;
    if (at >= k) return {0, 0, 0, 0};
    if (aligned) return load_activation16(from);
    Words4 v = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {  // shifted in from the top: no array is indexed at run time
        const uint32_t value = at + i < k ? load_activation2(from + 2 * i) : 0u;
        v = {v.x >> 16 | v.y << 16, v.y >> 16 | v.z << 16, v.z >> 16 | v.w << 16, v.w >> 16 | value << 16};
    }
    return v;
}

// What a token's values are changed by under a norm: (x - mean) * scale.
struct Factors {
    float mean, scale;
};

// bf16 activations of formats that multiply in fp16 are staged times a power of two a token, chosen so that nothing
// overflows and that what fp16 loses lies far below what the largest value's own rounding is worth. Under a norm it
// follows from the norm's weights (|x - mean| * scale is at most sqrt(K)). Without one it is 1, but for the rare token
// whose largest value is outside 2^-8 to 2^15: a vote among the threads finds it, and it is staged once more.
template <class F, class T, int THREADS> struct Stager {
    using Operand = typename F::template Operand<T>;
    static constexpr bool SCALED = Operand::BF16 != T::BF16;
    static constexpr int BANDS = THREADS / 32;  // runs of 32 lanes that add up together
    static constexpr int MOMENTS = BANDS * 8;   // floats: one for each token and band
    static constexpr int FLOATS = 2 * MOMENTS + 2 * BANDS + 8 + 1;
    static constexpr uint32_t TOO_LARGE = 0x4700u, LARGE_ENOUGH = 0x3b80u;  // 2^15 and 2^-8 in bf16
    enum Moment { SUM, SQUARES };
    const GemvArgs& a;
    const GemvPlan& plan;
    char* shared;
    bool judged;           // whether the tokens' powers are known
    uint32_t odd = 0;      // tokens with a power of their own
    float power = 1.f;     // of every token, under a norm
    Words4 gain[2];        // the norm's weights for a thread's first chunks: constant, and so loaded before the wait

    DEVICE Stager(const GemvArgs& a, const GemvPlan& plan, char* shared) : a(a), plan(plan), shared(shared), judged(!SCALED || a.norm != NORM_NONE) {
        if (threadIdx.x < 8) undos()[threadIdx.x] = 1.f;
        if (threadIdx.x == 8) votes() = 0;
        if (a.norm != NORM_NONE) {
            if (a.norm_weight)
                for (int i = 0; i < 2; ++i) gain[i] = load_chunk(a.norm_weight, int64_t(threadIdx.x + i * THREADS) * 8, a.k, plan.x_aligned);
            if constexpr (SCALED) bound_of(a.norm_weight, 0), bound_of(a.norm_bias, 1);
        }
        __syncthreads();
        if (SCALED && a.norm != NORM_NONE) {
            const float undo = undo_of(sqrtf(static_cast<float>(a.k)) * (most(bounds()) + plus()) + most(bounds() + BANDS));
            power = 1.f / undo;
            if (threadIdx.x < 8) undos()[threadIdx.x] = undo;
        }
    }
    DEVICE float undo(int token) const { return SCALED ? undos()[token] : 1.f; }
    DEVICE float* sums() const { return reinterpret_cast<float*>(shared + plan.sums_at); }

    // Stages `steps` steps of K, and zeros up to an even number, from step `first`; every thread calls it, and may read what it left when it returns.
    DEVICE void range(int first, int steps) {
        load(first, steps);
        bool settled = false;
        if (!judged && plan.resident == plan.phases) {
            __syncthreads();
            judge();
            settled = !odd;
            if (!F::SUMS && settled) return;
            if (odd) load(first, steps);
        }
        if (a.norm != NORM_NONE) normalise(padded(steps));
        if constexpr (F::SUMS) {
            if (!settled) __syncthreads();
            const uint32_t found = add_groups<F, Operand, THREADS>(shared, plan, int(a.m), sums(), padded(steps));
            if (found) atomicOr(&votes(), found);
        }
        __syncthreads();
    }

    // Where K is staged in phases the vote ends with the last: whether the tile must be done again.
    DEVICE bool must_repeat() {
        if (judged) return false;
        judge();
        if (F::SUMS && odd) {
            __syncthreads();
            if (threadIdx.x == 0) votes() &= UNBOUNDED - 1;  // they were counted before they had their power
        }
        return odd != 0;
    }
    // Whether a staged value of the token is not finite: one that no sum of a group may contain.
    DEVICE bool unbounded(int token) const { return votes() >> token & UNBOUNDED; }
    DEVICE float staged_value(int token, int k) const {
        if (a.norm == NORM_NONE) return T::up(load_activation2(static_cast<const uint16_t*>(a.x) + token * a.x_stride + k));
        return Operand::up(reinterpret_cast<const uint16_t*>(&chunk(token, k / 8))[k % 8]);
    }

private:
    DEVICE float* moments(Moment which) const { return reinterpret_cast<float*>(shared + plan.moments_at) + which * MOMENTS; }
    DEVICE float* bounds() const { return moments(SUM) + 2 * MOMENTS; }
    DEVICE float* undos() const { return bounds() + 2 * BANDS; }
    DEVICE uint32_t& votes() const { return *reinterpret_cast<uint32_t*>(undos() + 8); }  // bit token: large enough; 8 + token: too large; 16 + token: unbounded
    DEVICE Words4& chunk(int token, int c) const { return *reinterpret_cast<Words4*>(shared + token * plan.token_stride + c * 16); }
    DEVICE const char* row(int token) const { return static_cast<const char*>(a.x) + token * a.x_stride * 2; }
    DEVICE float plus() const { return a.norm == NORM_RMS_PLUS_ONE || !a.norm_weight ? 1.f : 0.f; }
    static DEVICE int padded(int steps) { return (steps + 1) / 2 * 2 * 4 * F::SUB; }  // chunks

    // 1 over the power of two that puts `bound` just under 2^15.
    static DEVICE float undo_of(float bound) {
        const int exponent = (float_to_bits(bound) & 0x7fffffffu) >> 23, held = exponent < 15 ? 15 : exponent > 254 ? 254 : exponent;
        return bits_to_float(uint32_t(held - 14) << 23);
    }
    // The largest magnitudes among eight values, as the bits of a pair, and the larger of a pair.
    static DEVICE uint32_t magnitudes(const Words4& v) {
        return pair_max(pair_max(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu), pair_max(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu));
    }
    static DEVICE uint32_t larger(uint32_t pair) { return max(pair & 0xffffu, pair >> 16); }
    static DEVICE uint32_t largest(const Words4& v) { return larger(magnitudes(v)); }
    static DEVICE float most(const float* m) {
        uint32_t v = 0;  // as bits, so that NaN is the largest
#pragma unroll
        for (int i = 0; i < BANDS; ++i) v = max(v, float_to_bits(m[i]));
        return bits_to_float(v);
    }
    // Leaves the largest magnitude of a row of K values among each band's chunks.
    DEVICE void bound_of(const void* values, int which) const {
        uint32_t found = 0;
        if (values)
            for (int64_t c = threadIdx.x; c * 8 < a.k; c += THREADS) found = max(found, largest(load_chunk(values, c * 8, a.k, plan.x_aligned)));
        found = run_max(found);
        if (threadIdx.x % 32 == 0) bounds()[which * BANDS + threadIdx.x / 32] = T::up(found);
    }
    // Finds the tokens whose power is not 1, and it.
    DEVICE void judge() {
        const uint32_t all = (1u << a.m) - 1;
        judged = true;
        odd = (~votes() | votes() >> 8) & all;
#pragma unroll 1
        for (int token = 0; token < a.m && odd; ++token) {
            if (!(odd >> token & 1)) continue;
            uint32_t found = 0;
            for (int64_t c = threadIdx.x; c * 8 < a.k; c += THREADS) found = max(found, largest(load_chunk(row(token), c * 8, a.k, plan.x_aligned)));
            found = run_max(found);
            if (threadIdx.x % 32 == 0) bounds()[threadIdx.x / 32] = T::up(found);
            __syncthreads();
            if (threadIdx.x == 0) undos()[token] = undo_of(most(bounds()));
            __syncthreads();
        }
    }
    // What is stored of a chunk before any norm.
    DEVICE Words4 staged(const Words4& raw, int token) const {
        if (!SCALED || a.norm != NORM_NONE) return raw;
        float v[8];
        unpack<T>(raw, v);
        if (odd) {
            const float by = 1.f / undos()[token];
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] *= by;
        }
        return pack<Operand>(v);
    }
    // Chunks into shared memory, a thread's own ones of every token, several loads under way at once; votes on the first time.
    template <int DEEP> DEVICE void copy(int64_t from, int here, int wanted) const {
        const int laps = (wanted + THREADS - 1) / THREADS, total = laps * int(a.m), end = laps * THREADS;
        int token = 0, c = threadIdx.x, to_token = 0, to = threadIdx.x;
        uint32_t vote = 0, seen = 0;
#pragma unroll 1
        for (int i = 0; i < total; i += DEEP) {
            Words4 v[DEEP];
#pragma unroll
            for (int j = 0; j < DEEP; ++j) {
                v[j] = {0, 0, 0, 0};
                if (token < a.m && c < here) v[j] = load_chunk(row(token) + from * 2, int64_t(c) * 8, a.k - from, DEEP > 1);
                if ((c += THREADS) >= end) c = threadIdx.x, ++token;
            }
#pragma unroll
            for (int j = 0; j < DEEP; ++j) {
                if (i + j >= total) break;
                if (to < wanted) chunk(to_token, to) = staged(v[j], to_token);
                if (!judged) seen = pair_max(seen, magnitudes(v[j]));
                if ((to += THREADS) < end) continue;
                vote |= (uint32_t(larger(seen) >= LARGE_ENOUGH) | uint32_t(larger(seen) >= TOO_LARGE) << 8) << to_token;
                to = threadIdx.x, ++to_token, seen = 0;
            }
        }
        if (!judged) {
            vote = run_or(vote);
            if (threadIdx.x % 32 == 0) atomicOr(&votes(), vote);
        }
    }
    DEVICE void load(int first, int steps) const {
        const int64_t from = int64_t(first) * F::KSTEP, left = a.k - from;
        const int wanted = padded(steps), here = int((left + 7) / 8 < wanted ? (left + 7) / 8 : wanted);
        if (plan.x_aligned) copy<8>(from, here, wanted);
        else copy<1>(from, here, wanted);
    }
    // Leaves a token's sum over each band: of x, or of (x - mean)^2. What lies past K counts as the mean.
    DEVICE void tally(Moment which, int chunks) const {
#pragma unroll 1
        for (int token = 0; token < a.m; ++token) {
            const float mean = which == SQUARES && a.norm == NORM_LAYER ? total(SUM, token) : 0.f;
            float even = 0.f, odds = 0.f;
            for (int c = threadIdx.x; c < chunks; c += THREADS) {
                float v[8];
                unpack<T>(chunk(token, c), v);
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    float d = v[e], f = v[e + 1];
                    if (which == SQUARES) {
                        if (a.norm == NORM_LAYER) d = c * 8 + e < int(a.k) ? d - mean : 0.f, f = c * 8 + e + 1 < int(a.k) ? f - mean : 0.f;
                        even = fmaf(d, d, even), odds = fmaf(f, f, odds);
                    } else {
                        even += d, odds += f;
                    }
                }
            }
            const float sum = run_sum(even + odds, 32);
            if (threadIdx.x % 32 == 0) moments(which)[token * BANDS + threadIdx.x / 32] = sum;
        }
        __syncthreads();
    }
    DEVICE float total(Moment which, int token) const {  // over K
        const float* m = moments(which) + token * BANDS;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < BANDS; ++i) sum += m[i];
        return sum / static_cast<float>(a.k);
    }
    // The norm, in a thread's own chunks; all of K is staged at once.
    DEVICE void normalise(int wanted) const {
        if (a.norm == NORM_LAYER) tally(SUM, wanted);
        tally(SQUARES, wanted);
        Factors mine = {0.f, 1.f};  // of token lane % 8
        if (const int token = lane_id() % 8; token < a.m) {
            if (a.norm == NORM_LAYER) mine.mean = total(SUM, token);
            mine.scale = rsqrtf(total(SQUARES, token) + a.epsilon);
        }
        const int end = (wanted + 31) / 32 * 32;  // whole runs, for from_lane
#pragma unroll 1
        for (int c = threadIdx.x, i = 0; c < end; c += THREADS, ++i) {
            Words4 g = {0, 0, 0, 0}, b = {0, 0, 0, 0};
            if (a.norm_weight) g = i == 0 ? gain[0] : i == 1 ? gain[1] : load_chunk(a.norm_weight, int64_t(c) * 8, a.k, plan.x_aligned);
            if (a.norm_bias) b = load_chunk(a.norm_bias, int64_t(c) * 8, a.k, plan.x_aligned);
            float times[8], shift[8];
            unpack<T>(g, times), unpack<T>(b, shift);
#pragma unroll
            for (int e = 0; e < 8; ++e) times[e] += plus();
#pragma unroll 2
            for (int token = 0; token < a.m; ++token) {
                const float mean = from_lane(mine.mean, token), scale = from_lane(mine.scale, token);
                if (c >= wanted) continue;
                float v[8];
                unpack<T>(chunk(token, c), v);
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf((v[e] - mean) * scale, times[e], shift[e]);
                if (int64_t(c) * 8 + 8 > a.k)
#pragma unroll
                    for (int e = 0; e < 8; ++e) v[e] = int64_t(c) * 8 + e < a.k ? v[e] : 0.f;
                Words4 out = pack<T>(v);  // rounded, as the module's own output would be
                if constexpr (SCALED) {
                    unpack<T>(out, v);
#pragma unroll
                    for (int e = 0; e < 8; ++e) v[e] *= power;
                    out = pack<Operand>(v);
                }
                chunk(token, c) = out;
            }
        }
    }
};
