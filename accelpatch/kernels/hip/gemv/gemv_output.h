// The epilogue of gemv_kernel.h for one output: sums that are not finite, scale, bias, activation and residual.
#pragma once
#include "arch/mma.h"

constexpr int PARTIAL_STRIDE =
    20;  // floats of one token and warp, [token][warp][PARTIAL_STRIDE]: 16 rows and a pad against bank conflicts

DEVICE int fours(const GemvArgs& a) { return a.group_shift; }  // outlier entries of a row, in fours
// The outlier entries of a tile's row, a multiple of 4. Of each the lower half of the word is its column, 0xffff for an
// unused entry, and the upper half its value in bf16.
template <class F> DEVICE const Words4* outliers_of(const GemvArgs& a, int tile, int r) {
    return static_cast<const Words4*>(a.offset) + (int64_t(tile) * 16 + r) * fours(a);
}

// What a thread needs to finish one output. It is loaded when the tile begins and used when it ends. These are
// constants but for the residual, which the kernel before may still write, so that load_residual() comes after the wait
// for it.
template <class F, class T> struct Output {
    float scale[2] = {1.f, 1.f};
    uint32_t bias[2] = {0, 0}, residual = 0;  // not converted here, which would wait for the loads
    int token, column = -1;                   // of y; none
    float outlier_sums[2] = {0.f, 0.f};       // of an output's rows
    Words4 outliers[COMPACT<F> ? 2 : 1];      // the first four of each row
    static DEVICE uint32_t bits(const void* from, int64_t i) {
        return load_activation2(static_cast<const uint16_t*>(from) + i);
    }
    // seat: token * 16 + row of the tile.
    DEVICE Output(const GemvArgs& a, const GemvPlan& plan, int tile, int seat) {
        const bool gate = a.activation == ACT_SILU_GATE;
        const int row = seat & 15, half = int(a.n / 2), n = gate ? tile * 8 + row : tile * 16 + row;
        token = seat >> 4;
        if (token >= a.m || tile >= plan.tiles || n >= (gate ? half : int(a.n)) || (gate && row >= 8)) return;
        column = n, token = row_of_token<F>(plan, token);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i && !gate) break;
            const int r = i ? n + half : n;
            if constexpr (ROW_FACTORS<F>) scale[i] = F::factor(a, tile * 16 + row + 8 * i);
            else if (F::GROUPS == 0 && !STAGE_SCALES<F> && a.scale)
                scale[i] = static_cast<const float*>(a.scale)[COMPACT<F> ? tile * 16 + row + 8 * i : r];
            if (a.bias) bias[i] = bits(a.bias, r);
            if constexpr (COMPACT<F>) outliers[i] = *outliers_of<F>(a, tile, row + 8 * i);
        }
    }
    DEVICE void load_residual(const GemvArgs& a) {
        if (a.residual && column >= 0) residual = bits(a.residual, token * a.residual_stride + column);
    }
    // token_scale: of a quantised token.
#if defined(LOW_RANK)
    float adapted[2] = {0.f, 0.f};  // adapters' products
    // From their sums `here`. `seat`: as the constructor's.
    DEVICE void add_adapters(const GemvArgs& a, const float* here, int seat) {
        if (column < 0) return;
        adapted[0] = low_rank_sum<T>(a, here, seat >> 4, column);
        if (a.activation == ACT_SILU_GATE) adapted[1] = low_rank_sum<T>(a, here, seat >> 4, column + int(a.n / 2));
    }
#endif
    template <bool COMMON, class V>
    DEVICE void store(const GemvArgs& a, V first, V second, float token_scale = 1.f) const {
        const auto finished = [&](V sum, int i) ALWAYS_INLINE {
#if defined(LOW_RANK)
            return fmaf(float(sum), scale[i], T::up(bias[i])) + adapted[i];
#endif
            if constexpr (QUANTIZES_ROWS<F>) return fmaf(token_scale * scale[i], float(sum), T::up(bias[i]));
            else return sum * scale[i] + (COMPACT<F> ? outlier_sums[i] + T::up(bias[i]) : T::up(bias[i]));
        };
        float v = finished(first, 0);
        if (a.activation == ACT_SILU_GATE) v = silu(v) * finished(second, 1);
        else if (!COMMON && a.activation != ACT_NONE) v = activate(v, a.activation);
        store_activation2(static_cast<uint16_t*>(a.y) + token * a.y_stride + column, T::down(v + T::up(residual)));
    }
};

// The dot product of a row with a token by a plain loop, for experts: one after another, each times its weight.
template <class F, class NORMS>
DEVICE float stacked_sum(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, int tile, int r) {
    const int each = plan.experts.steps;
    const float factor = a.norm ? norms.scale(0) : 0.f;  // of an RMSNorm, which has no mean
    float total = 0.f;
#pragma unroll 1
    for (int begin = 0; begin < plan.steps; begin += each) {
        float sum = 0.f;
        if (!has_expert(plan, begin)) continue;
#pragma unroll 1
        for (int k = begin * F::KSTEP; k < (begin + each) * F::KSTEP; ++k) {
            const StackPlace place = place_in_stack(a, plan, tile, k / F::KSTEP);
            const char* row = static_cast<const char*>(a.w) + place.step * F::STEP_BYTES + r * 64;
            const int64_t at = (place.set * 8 + r % 8) * F::GROUPS + k % F::KSTEP / (F::KSTEP / F::GROUPS);
            const auto number = [&](const void* table) ALWAYS_INLINE {
                return table_value(static_cast<const uint32_t*>(table)[at], r / 8, a.scale_is_bf16);
            };
            const float value =
                F::value(row, k % F::KSTEP, number(a.scale), F::OFFSET == OFFSET_NONE ? 0.f : number(a.offset));
            sum = fmaf(value, norms.value(token_of_block(plan), k, 0.f, factor), sum);
        }
        total = fmaf(sum, step_weight(plan, begin), total);
    }
    return total;
}

// The sum of a row's products with those of a token's values that are not finite, which alone decide whether the result
// is infinite or NaN; `none` where all values are finite.
template <class F, class NORMS>
DEVICE float unbounded_sum(
    const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, int tile, int r, int token, float none = 0.f) {
    const float mean = a.norm ? norms.mean(token) : 0.f, factor = a.norm ? norms.scale(token) : 0.f;
    const int64_t sets = scale_sets<F>(a, plan);
    const char* row = static_cast<const char*>(a.w);
    if (F::TILED) row += int64_t(tile) * plan.steps * F::STEP_BYTES + (THREE_BITS<F> ? 0 : r * 64);
    else row += min(weight_row(a, tile, r), a.n - 1) * row_bytes<F>(a);
    float sum = 0.f;
    bool found = false;
#pragma unroll 1
    for (int k = 0; k < int(a.k); ++k) {
        const float x = norms.value(token, k, mean, factor);
        if (fabsf(x) < INFINITY) continue;
        found = true;
        float scale = 1.f, offset = 0.f;
        if constexpr (F::GROUPS > 0) {
            const int step = k / F::KSTEP, group = k % F::KSTEP / (F::KSTEP / F::GROUPS);
            const int64_t at = ((tile * sets + (step >> a.group_shift)) * 8 + r % 8) * F::GROUPS + group;
            const auto word = [&](const void* table) ALWAYS_INLINE { return static_cast<const uint32_t*>(table)[at]; };
            if constexpr (ROW_FACTORS<F>) {
                scale = F::scale(word(a.scale), r / 8, k / 16 % 2);
            } else if constexpr (CODEBOOK<F> && TABLES<F> > 1) {
                scale = wide_value(word(a.scale), word(a.offset), r / 8);
            } else {
                scale = table_value(word(a.scale), r / 8, a.scale_is_bf16);
                if (TABLES<F> > 1) offset = table_value(word(a.offset), r / 8, a.scale_is_bf16);
            }
        }
        if constexpr (THREE_BITS<F>) sum += x * F::value(row, r, k, scale, offset);
        else sum += x * F::value(row, k, scale, offset);
    }
    return found ? sum : none;
}

// A token's value k, as the matrix product has used it.
template <class T, class NORMS>
DEVICE float staged_value(const GemvPlan& plan, const NORMS& norms, const char* shared, int token, int k) {
    return plan.staged_k_tiles == plan.k_tiles
               ? T::up(*reinterpret_cast<const uint16_t*>(shared + token * plan.token_stride + k * 2))
               : norms.value(token, k, 0.f, 0.f);
}

// The dot product of a row's outliers with a token, less the products of the codes that stand in the outliers' places.
// next: the row's first four entries.
template <class F, class T, class NORMS>
DEVICE float outlier_sum(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, const char* shared, Words4 next,
    float scale, int tile, int r, int token) {
    const float coded = Bf16::up(F::LEAST) * scale;
    float sum = 0.f;
#pragma unroll 1
    for (int four = 0;;) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = word_of(next, i), k = word & 0xffffu;
            if (k == 0xffffu) return sum;
            sum = fmaf(Bf16::up_high(word) - coded, staged_value<T>(plan, norms, shared, token, k), sum);
        }
        if (++four == fours(a)) return sum;
        next = outliers_of<F>(a, tile, r)[four];
    }
}

// The dot product of a row with a token, value by value, where the sum over codes is not finite. It differs there: an
// infinite activation may meet the code in an outlier's place, and codes before their scale are larger than the
// weights.
template <class F, class T, class NORMS>
DEVICE float careful_sum(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, const char* shared, float scale,
    int tile, int r, int token) {
    const char* from = static_cast<const char*>(a.w) + int64_t(tile) * plan.steps * F::STEP_BYTES;
    const uint32_t* outlier = reinterpret_cast<const uint32_t*>(outliers_of<F>(a, tile, r));
    int left = 4 * fours(a);  // of outliers, which come by column
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < int(a.k); ++k) {
        const float x = staged_value<T>(plan, norms, shared, token, k);
        if (x != x) return x;
        float w = F::value(from, r, k) * scale;
        if (left && int(*outlier & 0xffffu) == k) w = Bf16::up_high(*outlier), ++outlier, --left;
        sum = fmaf(w, x, sum);
    }
    return sum;
}

// Adds the outliers' products to an output. Where the result is not finite, careful_sum replaces the whole of it: it
// goes to outlier_sums, and the scale and the sum over codes become 0.
template <class F, class T, class NORMS>
DEVICE void add_outliers(const GemvArgs& a, const GemvPlan& plan, const NORMS& norms, const char* shared, int tile,
    int seat, bool gate, Output<F, T>& output, float& first, float& second) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i && !gate) break;
        const int r = (seat & 15) + 8 * i;
        output.outlier_sums[i] =
            outlier_sum<F, T>(a, plan, norms, shared, output.outliers[i], output.scale[i], tile, r, seat >> 4);
        if (RARELY(!(fabsf(fmaf(i ? second : first, output.scale[i], output.outlier_sums[i])) < INFINITY)))
            output.outlier_sums[i] = careful_sum<F, T>(a, plan, norms, shared, output.scale[i], tile, r, seat >> 4),
            output.scale[i] = 0.f, (i ? second : first) = 0.f;
    }
}
