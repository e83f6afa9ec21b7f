// The kernel: stream, stage, multiply, add up, epilogue.
#pragma once
#include "gemv_core.h"
#include "stage.h"

DEVICE float activate(float v, int kind) {
    if (kind == ACT_SILU || kind == ACT_SILU_GATE) return v / (1.f + expf(-v));
    if (kind == ACT_RELU) return v < 0.f ? 0.f : v;  // keeps NaN
    if (kind == ACT_GELU) return .5f * v * (1.f + erff(v * .70710678118654752f));
    if (kind == ACT_GELU_TANH) return .5f * v * (1.f + tanhf(.79788456080286536f * (v + .044715f * v * v * v)));
    return v;
}

template <int COUNT> DEVICE void load_floats(float* out, const float* from) {
    struct alignas(4 * COUNT) All { float v[COUNT]; };
    const All all = *reinterpret_cast<const All*>(from);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out[i] = all.v[i];
}
DEVICE float table_value(uint32_t pair, int half, bool bf16) {
    const uint32_t bits = half ? pair >> 16 : pair & 0xffffu;
    return bf16 ? Bf16::up(bits) : F16::up(bits);
}

// Adds one step to a tile's sums; `lane` is where this lane's activations of the step begin, `sums` the step's sums.
template <class F, class T, bool OFFSET, class STREAM>
DEVICE void accumulate(typename FragmentOf<T>::Type& total, const typename STREAM::Slot& slot, const GemvArgs& a, const GemvPlan& plan,
                       const char* lane, const float* step_sums) {
    using Fragment = typename FragmentOf<T>::Type;
    const int tokens = int(a.m);
    Fragment part;
    if constexpr (F::GROUPS > 0) part.zero();
#pragma unroll
    for (int p = 0; p < F::SUB; ++p) {
        const char* chunk = lane + F::chunk(p, 0) * 16;
        Words4 w[ROWS_PER_LANE];
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) w[h] = F::template expand<T>(slot.w[h], p);
        if constexpr (F::GROUPS == 0) {
            total.add(w, chunk, plan.token_stride, tokens);
        } else {
            part.add(w, chunk, plan.token_stride, tokens);
            constexpr int EACH = F::SUB / F::GROUPS;
            if ((p + 1) % EACH != 0) continue;
            const int group = p / EACH;
            part.gather();
            float scale[Fragment::SCALES], base[Fragment::SCALES], least[Fragment::SCALES], sums[Fragment::TOKENS];
            if constexpr (F::SUMS) load_floats<Fragment::TOKENS>(sums, step_sums + group * 8);
#pragma unroll
            for (int j = 0; j < Fragment::SCALES; ++j) {
                const int word = Fragment::scale_word(j, F::GROUPS, group), half = Fragment::scale_half(j);
                scale[j] = table_value(slot.scale[word], half, a.scale_is_bf16);
                base[j] = -F::template base<T>() - 8.f, least[j] = 0.f;
                if constexpr (OFFSET) {
                    const float offset = table_value(slot.offset[word], half, a.scale_is_bf16);
                    const bool minimum = a.offset_kind == OFFSET_MINIMUM;
                    base[j] = -F::template base<T>() - (minimum ? 0.f : offset), least[j] = minimum ? offset * Fragment::sum_share() : 0.f;
                }
                base[j] *= Fragment::sum_share();
            }
#pragma unroll
            for (int i = 0; i < Fragment::SIZE; ++i) {
                const int j = Fragment::scale_of(i);
                if constexpr (F::SUMS) {
                    const float sum = sums[i % Fragment::TOKENS];
                    total.sum[i] = fmaf(fmaf(sum, base[j], part.sum[i]), scale[j], total.sum[i]);
                    if constexpr (OFFSET) total.sum[i] = fmaf(sum, least[j], total.sum[i]);
                } else {
                    total.sum[i] = fmaf(part.sum[i], scale[j], total.sum[i]);
                }
            }
            part.zero();
        }
    }
}

// What a thread needs to finish one output; loaded when its tile begins, used when the tile ends.
template <class F, class T> struct Output {
    float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f}, residual = 0.f;
    int64_t at = -1;  // into y
    DEVICE static float value(const void* from, int64_t i) { return T::up(load_activation2(static_cast<const uint16_t*>(from) + i)); }
    DEVICE Output(const GemvArgs& a, const GemvPlan& plan, int tile, int thread) {
        const int token = thread >> 4, row = thread & 15;
        const bool gate = a.activation == ACT_SILU_GATE;
        const int64_t half = a.n / 2, n = gate ? int64_t(tile) * 8 + row : int64_t(tile) * 16 + row;
        if (thread >= 128 || token >= a.m || tile >= plan.tiles || n >= (gate ? half : a.n) || (gate && row >= 8)) return;
        at = token * a.y_stride + n;
        for (int i = 0; i < 2; ++i) {
            const int64_t r = i && gate ? n + half : n;
            if (F::GROUPS == 0 && a.scale) scale[i] = static_cast<const float*>(a.scale)[r];
            scale[i] *= F::template unit<T>();
            if (a.bias) bias[i] = value(a.bias, r);
        }
        if (a.residual) residual = value(a.residual, token * a.residual_stride + n);
    }
    DEVICE void store(const GemvArgs& a, float first, float second) const {
        if (at < 0) return;
        float v = activate(first * scale[0] + bias[0], a.activation);
        if (a.activation == ACT_SILU_GATE) v *= second * scale[1] + bias[1];
        static_cast<uint16_t*>(a.y)[at] = static_cast<uint16_t>(T::down(v + residual));
    }
};

template <class F, class T, bool OFFSET, int WK, int WN>
__global__ void __launch_bounds__(WK* WN* WAVE, ACCELPATCH_MMA_MIN_BLOCKS) gemv_kernel(const GemvArgs a, const GemvPlan plan) {
    using Fragment = typename FragmentOf<T>::Type;
    using Flow = Stream<F, T, OFFSET, WK, WN>;
    extern __shared__ __align__(128) char shared[];
    static_assert(WK * WAVE >= 128, "a thread for each of 16 rows and 8 tokens");
    const int wave = threadIdx.x / WAVE, wk = wave % WK, wn = wave / WK, inner = threadIdx.x % (WK * WAVE);
    if (a.dependent != 2) grid_release();

    Flow flow(a, plan, wk, wn);
    int slot = 0;
#if ACCELPATCH_AMD
    typename Flow::Slot ring[RING_UNROLL];
#pragma unroll
    for (int u = 0; u < RING_UNROLL; ++u) flow.issue(ring[u]);
#else
    constexpr int SLOT = SLOT_BYTES<F, OFFSET>;
    const int ring_bytes = plan.depth * SLOT;
    char* ring = shared + pinned(plan.ring_at + wave * ring_bytes + lane_id() * 16);
    for (int at = 0; at < ring_bytes; at += SLOT) flow.issue(ring + at);
    if (plan.prefetch) {
        Flow ahead = flow;
        ahead.prefetch(plan.prefetch);
    }
#endif
    Stager<F, T, WK * WN * WAVE> stager(a, plan, shared);
    grid_wait();
    const bool all = plan.resident == plan.phases;
    bool staged = false;
    int turn = 0;
    const int lane_at = pinned(Fragment::column(int(a.m)) * plan.token_stride + F::chunk(0, fragment_quarter()) * 16);
    const int sums_at = pinned(plan.sums_at + (Fragment::token(0) & 7) * 4);
    const int groups = (plan.tiles + WN - 1) / WN;
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const Output<F, T> output(a, plan, group * WN + wn, inner);
        float first = 0.f, second = 0.f;
        for (int phase = 0; phase < plan.phases; ++phase) {
            if (!(all && staged)) {
                const int begin = phase * plan.phase_steps, left = plan.steps - begin;
                if (staged) __syncthreads();
                stager.range(begin, all || left < plan.phase_steps ? left : plan.phase_steps);
                staged = true;
            }
            Fragment total;
            total.zero();
            const int steps = Flow::steps_here(plan, phase), n = Flow::turns(steps), valid = Flow::valid_turns(steps, wk);
            int step = (all ? phase * plan.phase_steps : 0) + wk * F::RUN;
            for (int i = 0; i < n; i += RING_UNROLL) {
#pragma unroll
                for (int u = 0; u < RING_UNROLL; step += Flow::stride(i + u), ++u) {
                    const char* x = shared + (lane_at + step * F::SUB * 64);
                    const float* sums = reinterpret_cast<const float*>(shared + (sums_at + step * F::GROUPS * 32));
#if ACCELPATCH_AMD
                    if (i + u < valid) accumulate<F, T, OFFSET, Flow>(total, ring[u], a, plan, x, sums);
                    flow.issue(ring[u]);
#else
                    char* here = ring + slot;
                    slot = slot + SLOT == ring_bytes ? 0 : slot + SLOT;
                    ring_wait(plan.depth);
                    typename Flow::Slot now;
                    flow.read(now, here);
                    flow.issue(here);
                    if (i < valid) accumulate<F, T, OFFSET, Flow>(total, now, a, plan, x, sums);
#endif
                }
            }
            total.finish();
            float* partial = reinterpret_cast<float*>(shared + plan.partial_at) + ((turn & 1) * WN + wn) * WK * PARTIAL_FLOATS;
#pragma unroll
            for (int i = 0; i < Fragment::SIZE; ++i)
                if (Fragment::owns(i)) partial[wk * PARTIAL_FLOATS + Fragment::token(i) * PARTIAL_STRIDE + Fragment::row(i)] = total.sum[i];
            group_barrier(wn, WK * WAVE);
            ++turn;
            if (output.at >= 0) {
                const float* mine = partial + (inner >> 4) * PARTIAL_STRIDE + (inner & 15);
                float sum[2] = {0.f, 0.f};
#pragma unroll
                for (int w = 0; w < WK; ++w) sum[0] += mine[w * PARTIAL_FLOATS];
                if (a.activation == ACT_SILU_GATE)
#pragma unroll
                    for (int w = 0; w < WK; ++w) sum[1] += mine[w * PARTIAL_FLOATS + 8];
                first += sum[0], second += sum[1];
            }
        }
        output.store(a, first, second);
    }
    if (a.dependent == 2) grid_release();
}
