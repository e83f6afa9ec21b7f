// A warp's sums of one tile, 16 rows by up to 8 tokens (or 4), to which it adds stage after stage of K. There is a
// class for each kind of format; SumsFor chooses among them.
#pragma once
#include "gemv/halves.h"
#include "gemv/limb_stage.h"
#include "gemv/quantized_stage.h"

// A 16-bit scale or offset from a table. half: 0 for row r < 8 of a pair of rows, 1 for row r + 8.
DEVICE float table_value(uint32_t pair, int half, bool bf16) {
    const uint32_t bits = half ? pair >> 16 : pair & 0xffffu;
    return bf16 ? Bf16::up(bits) : F16::up(bits);
}
// The same for a float32 scale, whose upper and lower 16 bits are in two tables.
DEVICE float wide_value(uint32_t high, uint32_t low, int half) {
    return bits_to_float(half ? permute<0x7632>(low, high) : permute<0x5410>(low, high));
}

DEVICE float silu(float v) { return v * fast_reciprocal(1.f + fast_exp2(v * -1.44269504088896f)); }
DEVICE float activate(float v, int kind) {
    if (kind == ACT_SILU) return silu(v);
    if (kind == ACT_RELU) return v < 0.f ? 0.f : v;  // keeps NaN
    if (kind == ACT_GELU) return .5f * v * (1.f + erff(v * .70710678118654752f));
    if (kind == ACT_GELU_TANH) return .5f * v * (1.f + tanhf(.79788456080286536f * (v + .044715f * v * v * v)));
    return v;
}

// Weights of float formats as T, times activations of T.
template <class F, class T> struct FloatSums : FloatMma<T> {
    using Mma = FloatMma<T>;
    using Value = float;  // the type of a sum
    template <bool COMMON> using Stager = FloatStager<F, T, COMMON>;
    // The addresses of this lane's activations in shared memory, from the first staged step on.
    struct Place {
        const char* x;
        int token_stride, tokens;
        DEVICE Place(const GemvArgs& a, const GemvPlan& plan, const char* shared)
            : x(shared + Mma::column(int(a.m)) * plan.token_stride + F::chunk(0, fragment_quarter()) * 16),
              token_stride(plan.token_stride),
              tokens(int(a.m)) {}
    };
    // Multiplies the stage that begins `step` steps after the first staged step.
    template <bool> DEVICE void multiply_stage(const Slot<F> (&now)[PAIR<F>], const Place& place, int step) {
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u)
#pragma unroll
            for (int p = 0; p < F::PARTS; ++p) {
                Words4 w[ROWS_PER_LANE];
#pragma unroll
                for (int h = 0; h < ROWS_PER_LANE; ++h) {
                    if constexpr (COMPACT<F>) w[h] = F::expand(now[u].w[h], now[u].exponents[2 * h + p], p);
                    else w[h] = F::template expand<T>(now[u].w[h], p);
                }
                Mma::add(
                    w, place.x + (step + u) * (F::KSTEP * 2) + F::chunk(p, 0) * 16, place.token_stride, place.tokens);
            }
    }
};

// The same with a scale for each row and stage: each stage has a sum, which is multiplied by its scale.
template <class F, class T> struct StageScaledSums : FloatSums<F, T> {
    using Base = FloatSums<F, T>;
    static constexpr int COUNT = Base::COUNT;
    float sum[COUNT];
    const float* scales[COUNT];  // of the row of each sum, [stages]
    int staged_from = 0;         // the first staged step
    // Sets the tile whose scales are used.
    DEVICE void set_tile(const GemvArgs& a, int tile) {
        const int64_t stages = (a.k + F::KSTEP * PAIR<F> - 1) / (F::KSTEP * PAIR<F>);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            scales[i] = static_cast<const float*>(a.scale) + min(weight_row(a, tile, Base::row(i)), a.n - 1) * stages;
    }
    DEVICE void zero() {
        for (float& v : sum) v = 0.f;
    }
    DEVICE void finish() {}
    template <bool BF16_SCALES>
    DEVICE void multiply_stage(const Slot<F> (&now)[PAIR<F>], const typename Base::Place& place, int step) {
        float scale[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) scale[i] = scales[i][(staged_from + step) / PAIR<F>];
        Base::zero();
        Base::template multiply_stage<BF16_SCALES>(now, place, step);
        Base::finish();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum[i] = fmaf(Base::sum[i], scale[i], sum[i]);
    }
};

// Weights as fp16, exactly, times activations as fp16 (halves.h). Each block of 128 values of K has a sum, which for
// bf16 activations is multiplied by its block exponent.
template <class F, class T> struct HalfSums : Cells<false> {
    using Value = float;
    using Mma = FloatMma<F16>;
    template <bool COMMON> using Stager = HalfStager<F, T, COMMON>;
    static constexpr int BLOCK_STEPS = 128 / F::KSTEP;
    float sum[COUNT];
    struct Place {
        const char* x;
        const float* block_exponents;
        DEVICE Place(const GemvArgs& a, const GemvPlan& plan, const char* shared)
            : x(shared + Mma::column(int(a.m)) * plan.token_stride + F::chunk(0, fragment_quarter()) * 16),
              block_exponents(reinterpret_cast<const float*>(shared + plan.block_exponents_at) + token(0)) {}
    };
    DEVICE void zero() {
        for (float& v : sum) v = 0.f;
    }
    DEVICE void finish() {}
    template <bool> DEVICE void multiply_stage(const Slot<F> (&now)[PAIR<F>], const Place& place, int step) {
        Mma part;
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u) {
            if (u % BLOCK_STEPS == 0) part.zero();
#pragma unroll
            for (int p = 0; p < F::PARTS; ++p) {
                Words4 w[ROWS_PER_LANE];
                F::halves(now[u], p, w);
                part.add(w, place.x + (step + u) * (F::KSTEP * 2) + F::chunk(p, 0) * 16, 0, 0);
            }
            if ((u + 1) % BLOCK_STEPS) continue;
            part.finish();
            float block_exponents[TOKENS];
            if constexpr (T::BF16)
                load_floats<TOKENS>(block_exponents, place.block_exponents + (step + u) / BLOCK_STEPS * 8);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const float value = T::BF16 ? part.sum[i] * block_exponents[i % TOKENS] : part.sum[i];
                sum[i] = STAGE_SCALES<F> ? fmaf(value, bits_to_float(now[0].scale[half(i)]), sum[i]) : sum[i] + value;
            }
        }
    }
};

// Weights of integer formats and codebooks as int8, times activations in two int8 limbs (limbs.h).
template <class F, class T, bool NARROW> struct IntegerSums : Cells<NARROW> {
    using Mma = IntegerMma<NARROW>;
    using Value = float;
    template <bool COMMON> using Stager = LimbStager<F, T, NARROW, false, COMMON>;
    using Cell = Cells<NARROW>;
    static constexpr int CHUNKS = F::PARTS / 2;  // times that expand() gives 16 bytes of a lane's row and step
    // Whether there are two chains of products, where each product of a single one would wait for the one before.
    static constexpr bool CHAINS = NARROW || F::GROUPS == 0;
    // Products that share a scale.
    static constexpr int SCALE_PARTS = F::GROUPS ? F::PARTS / F::GROUPS : F::PARTS * PAIR<F>;
    float sum[Cell::COUNT];
    struct Place {
        const char* x;
        const float *block_exponents, *group_sums;
        DEVICE Place(const GemvArgs& a, const GemvPlan& plan, const char* shared)
            : x(shared + Mma::activations_at(int(a.m), plan.token_stride)),
              block_exponents(reinterpret_cast<const float*>(shared + plan.block_exponents_at) + Cell::token(0)),
              group_sums(reinterpret_cast<const float*>(shared + plan.sums_at) + Cell::token(0)) {}
    };
    DEVICE void zero() {
        for (float& v : sum) v = 0.f;
    }
    DEVICE void finish() {}
    template <bool BF16_SCALES>
    DEVICE void multiply_stage(const Slot<F> (&now)[PAIR<F>], const Place& place, int step) {
        if constexpr (CODEBOOK<F>) multiply_book<F::LIMBS>(now, place, step);
        else multiply_codes<BF16_SCALES>(now, place, step);
    }

private:
    template <bool BF16_SCALES>
    DEVICE void multiply_codes(const Slot<F> (&now)[PAIR<F>], const Place& place, int step) {
        const char* x = place.x + step * (F::KSTEP * 2);
        const float* block_exponent = place.block_exponents + step * (F::KSTEP / 16);
        const float* group_sum = place.group_sums + step * F::GROUPS * 8;
        Mma part, other;
        part.zero(), other.zero();
#pragma unroll
        for (int i = 0; i < PAIR<F> * CHUNKS; ++i) {
            const int u = i / CHUNKS, chunk = i % CHUNKS;
            Words4 w[ROWS_PER_LANE];
#pragma unroll
            for (int h = 0; h < ROWS_PER_LANE; ++h) w[h] = F::expand(now[u].w[h], chunk);
            const typename Mma::Activations limbs = Mma::load(x + i * 128);
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                (SCALE_PARTS > 2 && CHAINS && p ? other : part).add(w, limbs, p);
                const int done = i * 2 + p + 1;  // products of the stage
                if (done % SCALE_PARTS != 0) continue;
                if (SCALE_PARTS > 2 && CHAINS) part.plus(other), other.zero();
                add_group<BF16_SCALES>(part, now[u], block_exponent + (done - 1) / 4 * 8, group_sum,
                    done % F::PARTS ? done % F::PARTS / SCALE_PARTS - 1 : F::GROUPS - 1);
                group_sum += F::GROUPS ? 8 : 0;
                part.zero();
            }
        }
    }
    // The same for a codebook, where each limb of the weights has its own products.
    template <int LIMBS> DEVICE void multiply_book(const Slot<F> (&now)[PAIR<F>], const Place& place, int step) {
        const char* x = place.x + step * (F::KSTEP * 2);
        const float* block_exponent = place.block_exponents + step * (F::KSTEP / 16);
        Mma part[LIMBS];
        for (Mma& one : part) one.zero();
#pragma unroll
        for (int i = 0; i < PAIR<F> * CHUNKS; ++i) {
            const int u = i / CHUNKS, chunk = i % CHUNKS;
            Words4 expanded[ROWS_PER_LANE][LIMBS];
#pragma unroll
            for (int h = 0; h < ROWS_PER_LANE; ++h) F::expand(now[u].w[h], chunk, expanded[h]);
            const typename Mma::Activations limbs = Mma::load(x + i * 128);
#pragma unroll
            for (int p = 0; p < 2; ++p) {
#pragma unroll
                for (int q = 0; q < LIMBS; ++q) {
                    Words4 w[ROWS_PER_LANE];
#pragma unroll
                    for (int h = 0; h < ROWS_PER_LANE; ++h) w[h] = expanded[h][q];
                    part[q].add(w, limbs, p);
                }
                const int done = i * 2 + p + 1;  // products of the stage
                if (done % SCALE_PARTS != 0) continue;
                add_book(part, now[u], block_exponent + (done - 1) / 4 * 8,
                    done % F::PARTS ? done % F::PARTS / SCALE_PARTS - 1 : F::GROUPS - 1);
                for (Mma& one : part) one.zero();
            }
        }
    }
    // Adds the products of a group, times its block exponent and its scale. For ROW_FACTORS part[0] and part[1] are the
    // products of the first and of the last 16 values of a group, which have different scales.
    template <int LIMBS>
    DEVICE void add_book(const Mma (&part)[LIMBS], const Slot<F>& slot, const float* block_exponent, int group) {
        float block_exponents[Cell::TOKENS];
        load_floats<Cell::TOKENS>(block_exponents, block_exponent);
#pragma unroll
        for (int i = 0; i < Cell::COUNT; ++i) {
            const int word = Cell::pair(i) * F::GROUPS + group;
            if constexpr (ROW_FACTORS<F>) {
#pragma unroll
                for (int last = 0; last < 2; ++last)
                    sum[i] = fmaf(part[last].value(i) * block_exponents[i % Cell::TOKENS],
                        F::scale(slot.scale[word], Cell::half(i), last), sum[i]);
                continue;
            }
            sum[i] = fmaf(Mma::value_of_book(part, i) * block_exponents[i % Cell::TOKENS],
                TABLES<F> > 1 ? wide_value(slot.scale[word], slot.offset[word], Cell::half(i))
                              : table_value(slot.scale[word], Cell::half(i), true),
                sum[i]);
        }
    }
    // Adds the products of a group, times its block exponent and its scale. With an offset it also adds the sum of the
    // group's activations times F::rest(), the part of each weight that expand() leaves out.
    template <bool BF16_SCALES>
    DEVICE void add_group(
        const Mma& part, const Slot<F>& slot, const float* block_exponent, const float* group_sum, int group) {
        float block_exponents[Cell::TOKENS], group_sums[Cell::TOKENS];
        load_floats<Cell::TOKENS>(block_exponents, block_exponent);
        if constexpr (SUMMED<F>) load_floats<Cell::TOKENS>(group_sums, group_sum);
#pragma unroll
        for (int i = 0; i < Cell::COUNT; ++i) {
            const float value = part.value(i) * block_exponents[i % Cell::TOKENS];
            if constexpr (F::GROUPS == 0) {
                sum[i] += value;
            } else {
                const int word = Cell::pair(i) * F::GROUPS + group;
                const float scale = table_value(slot.scale[word], Cell::half(i), BF16_SCALES);
                sum[i] = fmaf(value, scale, sum[i]);
                if constexpr (SUMMED<F>)
                    sum[i] = fmaf(group_sums[i % Cell::TOKENS],
                        F::rest(scale, table_value(slot.offset[word], Cell::half(i), BF16_SCALES)), sum[i]);
            }
        }
    }
};

// Weights and activations as bytes, with a scale for each token. The sums are over all of K; the epilogue applies the
// scales.
template <class F, class T> struct ByteSums : ByteMma<F> {
    using Mma = ByteMma<F>;
    using Value = typename F::Sum;
    template <bool COMMON> using Stager = QuantizedStager<F, T, WholeRows, COMMON>;
    struct Place {
        const char* x;
        DEVICE Place(const GemvArgs& a, const GemvPlan& plan, const char* shared)
            : x(shared + Mma::activations_at(int(a.m), plan.token_stride)) {}
    };
    template <bool> DEVICE void multiply_stage(const Slot<F> (&now)[PAIR<F>], const Place& place, int step) {
#pragma unroll
        for (int u = 0; u < PAIR<F>; ++u)
            Mma::add(now[u].w, *reinterpret_cast<const Words4*>(place.x + (step + u) * F::KSTEP));
    }
};

template <class F, class T, bool NARROW>
using SumsFor = std::conditional_t<QUANTIZES_ROWS<F>, ByteSums<F, T>,
    std::conditional_t<F::QUANTIZES, IntegerSums<F, T, NARROW>,
        std::conditional_t<HALVES<F>, HalfSums<F, T>,
            std::conditional_t<STAGE_SCALES<F>, StageScaledSums<F, T>, FloatSums<F, T>>>>>;
