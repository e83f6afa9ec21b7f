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

// What expand() takes off: the magic number's base and the zero point of row h, as a pair.
template <class F, class T, class SLOT> DEVICE uint32_t zero_pair(const SLOT& slot, const GemvArgs& a, int group, int h) {
    if constexpr (!F::SUBTRACT) return 0;
    else {
        const float zero = F::OFFSETS ? table_value(slot.offset[group], h, a.scale_is_bf16) : 8.f;
        const uint32_t bits = T::down(F::template base<T>() + zero);
        return bits | bits << 16;
    }
}
// A group's products into the totals: times its scale, less what its sum of activations accounts for.
template <class F, class T, class SLOT>
DEVICE void add_group(typename FragmentOf<T>::Type& total, const typename FragmentOf<T>::Type& part, const SLOT& slot, const GemvArgs& a,
                      const float* group_sums, int group) {
    using Fragment = typename FragmentOf<T>::Type;
    float scale[Fragment::SCALES], base[Fragment::SCALES], least[Fragment::SCALES], sums[Fragment::TOKENS];
    if constexpr (F::SUMS) load_floats<Fragment::TOKENS>(sums, group_sums);
#pragma unroll
    for (int j = 0; j < Fragment::SCALES; ++j) {
        const int word = Fragment::scale_word(j, F::GROUPS, group), half = Fragment::scale_half(j);
        scale[j] = table_value(slot.scale[word], half, a.scale_is_bf16);
        if constexpr (F::SUMS) {
            const float offset = F::OFFSETS ? table_value(slot.offset[word], half, a.scale_is_bf16) : 8.f;
            const bool minimum = F::OFFSETS && a.offset_kind == OFFSET_MINIMUM;
            base[j] = -(F::template base<T>() + (minimum ? 0.f : offset)) * Fragment::sum_share();
            least[j] = minimum ? offset * Fragment::sum_share() : 0.f;
        }
    }
#pragma unroll
    for (int i = 0; i < Fragment::SIZE; ++i) {
        const int j = Fragment::scale_of(i);
        float v = part.sum[i];
        if constexpr (F::SUMS) v = fmaf(sums[i % Fragment::TOKENS], base[j], v);
        total.sum[i] = fmaf(v, scale[j], total.sum[i]);
        if constexpr (F::SUMS && F::OFFSETS) total.sum[i] = fmaf(sums[i % Fragment::TOKENS], least[j], total.sum[i]);
    }
}

// Adds one step to a tile's sums; `lane` is where this lane's activations of the step begin, `sums` the step's sums.
template <class F, class T, class SLOT>
DEVICE void accumulate(typename FragmentOf<T>::Type& total, const SLOT& slot, const GemvArgs& a, const GemvPlan& plan, const char* lane,
                       const float* step_sums) {
    using Fragment = typename FragmentOf<T>::Type;
    const int tokens = int(a.m);
    Fragment part;
    if constexpr (F::GROUPS > 0) part.zero();
#pragma unroll
    for (int p = 0; p < F::SUB; ++p) {
        constexpr int EACH = F::GROUPS ? F::SUB / F::GROUPS : F::SUB;
        const int group = p / EACH;
        const char* chunk = lane + F::chunk(p, 0) * 16;
        Words4 w[ROWS_PER_LANE];
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) w[h] = F::template expand<T>(slot.w[h], p, zero_pair<F, T>(slot, a, group, h));
        if constexpr (F::GROUPS == 0) {
            total.add(w, chunk, plan.token_stride, tokens);
        } else {
            part.add(w, chunk, plan.token_stride, tokens);
            if ((p + 1) % EACH != 0) continue;
            part.gather();
            add_group<F, T>(total, part, slot, a, step_sums + group * 8, group);
            part.zero();
        }
    }
}

// What a thread needs to finish one output; loaded when its tile begins, used when the tile ends.
template <class F, class T> struct Output {
    float scale[2] = {1.f, 1.f};
    uint32_t bias[2] = {0, 0}, residual = 0;  // as bits: converting them here would wait for them here
    int64_t at = -1;                          // into y
    static DEVICE uint32_t bits(const void* from, int64_t i) { return load_activation2(static_cast<const uint16_t*>(from) + i); }
    DEVICE Output(const GemvArgs& a, const GemvPlan& plan, int tile, int thread) {
        const int token = thread >> 4, row = thread & 15;
        const bool gate = a.activation == ACT_SILU_GATE;
        const int64_t half = a.n / 2, n = gate ? int64_t(tile) * 8 + row : int64_t(tile) * 16 + row;
        if (thread >= 128 || token >= a.m || tile >= plan.tiles || n >= (gate ? half : a.n) || (gate && row >= 8)) return;
        at = token * a.y_stride + n;
        for (int i = 0; i < 2; ++i) {
            const int64_t r = i && gate ? n + half : n;
            if (F::GROUPS == 0 && a.scale) scale[i] = static_cast<const float*>(a.scale)[r];
            if (a.bias) bias[i] = bits(a.bias, r);
        }
        if (a.residual) residual = bits(a.residual, token * a.residual_stride + n);
    }
    DEVICE void store(const GemvArgs& a, float first, float second) const {
        if (at < 0) return;
        float v = activate(first * (scale[0] * F::template unit<T>()) + T::up(bias[0]), a.activation);
        if (a.activation == ACT_SILU_GATE) v *= second * (scale[1] * F::template unit<T>()) + T::up(bias[1]);
        static_cast<uint16_t*>(a.y)[at] = static_cast<uint16_t>(T::down(v + T::up(residual)));
    }
};

#ifdef ACCELPATCH_TRACE
// [block][8]: times in ns at five places of block's first thread, then its processor.
#define TRACE(at) trace(a, at)
DEVICE void trace(const GemvArgs& a, int at) {
    uint64_t now;
    uint32_t processor;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    asm volatile("mov.u32 %0, %smid;" : "=r"(processor));
    if (threadIdx.x == 0 && a.trace) a.trace[blockIdx.x * 8 + at] = now, a.trace[blockIdx.x * 8 + 5] = processor;
}
#else
#define TRACE(at)
#endif

template <class F, class T, int WK, int WN>
__global__ void __launch_bounds__(WK* WN* WAVE, ACCELPATCH_MMA_MIN_BLOCKS) gemv_kernel(const GemvArgs a, const GemvPlan plan) {
    using Fragment = typename FragmentOf<T>::Type;
    using Flow = Stream<F, T, WK, WN>;
    constexpr int RING_UNROLL = Flow::RING_UNROLL, PAIR = Flow::PAIR;
    extern __shared__ __align__(128) char shared[];
    static_assert(WK * WAVE >= 128, "a thread for each of 16 rows and 8 tokens");
    const int wave = threadIdx.x / WAVE, wk = wave % WK, wn = wave / WK, inner = threadIdx.x % (WK * WAVE);
    TRACE(0);
    if (a.dependent != 2) grid_release();

    Flow flow(a, plan, wk, wn);
    int slot = 0;
#if ACCELPATCH_AMD
    typename Flow::Slot ring[RING_UNROLL][PAIR];
#pragma unroll
    for (int u = 0; u < RING_UNROLL; ++u) flow.issue(ring[u]);
#else
    constexpr int SLOT = PAIR * SLOT_BYTES<F>;
    const int ring_bytes = plan.depth * SLOT;
    char* ring = shared + pinned(plan.ring_at + wave * ring_bytes + lane_id() * 16);
    for (int at = 0; at < ring_bytes; at += SLOT) flow.issue(ring + at);
    if (plan.prefetch) {
        Flow ahead = flow;
        ahead.prefetch(plan.prefetch);
    }
#endif
    Stager<F, T, WK * WN * WAVE> stager(a, plan, shared);
    TRACE(1);
    grid_wait();
    TRACE(2);
    const bool all = plan.resident == plan.phases;
    bool staged = false;
    int flushes = 0;
    const int lane_at = pinned(Fragment::column(int(a.m)) * plan.token_stride + F::chunk(0, fragment_quarter()) * 16);
    const int sums_at = pinned(plan.sums_at + (Fragment::token(0) & 7) * 4);
    for (int round = 0; Flow::tile_of(round, 0) < plan.tiles; ++round) {
        const Output<F, T> output(a, plan, Flow::tile_of(round, wn), inner);
        Fragment total;
        total.zero();
        for (int phase = 0; phase < plan.phases; ++phase) {
            if (!(all && staged)) {
                const int begin = phase * plan.phase_steps, left = plan.steps - begin;
                if (staged) __syncthreads();
                stager.range(begin, all || left < plan.phase_steps ? left : plan.phase_steps);
                if (!staged) TRACE(3);
                staged = true;
            }
            const int steps = Flow::steps_here(plan, phase), n = Flow::turns(steps), valid = Flow::valid_turns(steps, wk);
            int step = (all ? phase * plan.phase_steps : 0) + wk * PAIR;
            for (int i = 0; i < n; i += RING_UNROLL) {
#pragma unroll
                for (int turn = 0; turn < RING_UNROLL; ++turn, step += WK * PAIR) {
                    const char* x = shared + (lane_at + step * F::SUB * 64);
                    const float* sums = reinterpret_cast<const float*>(shared + (sums_at + step * F::GROUPS * 32));
#if ACCELPATCH_AMD
                    typename Flow::Slot(&now)[PAIR] = ring[turn];
#else
                    char* here = ring + slot;
                    slot = slot + SLOT == ring_bytes ? 0 : slot + SLOT;
                    ring_wait(plan.depth);
                    typename Flow::Slot now[PAIR];
#pragma unroll
                    for (int u = 0; u < PAIR; ++u) flow.read(now[u], here + u * SLOT_BYTES<F>);
                    flow.issue(here);
#endif
                    if (i + turn < valid) {
#pragma unroll
                        for (int u = 0; u < PAIR; ++u)
                            accumulate<F, T>(total, now[u], a, plan, x + u * F::SUB * 64, sums + u * F::GROUPS * 8);
                    }
#if ACCELPATCH_AMD
                    flow.issue(now);
#endif
                }
            }
        }
        total.finish();
        // [token][wave][PARTIAL_STRIDE]
        float* partial = reinterpret_cast<float*>(shared + plan.partial_at) + ((plan.partial_buffers - 1 & flushes) * WN + wn) * int(a.m) * WK * PARTIAL_STRIDE;
#pragma unroll
        for (int i = 0; i < Fragment::SIZE; ++i)
            if (Fragment::owns(i) && Fragment::token(i) < a.m) partial[(Fragment::token(i) * WK + wk) * PARTIAL_STRIDE + Fragment::row(i)] = total.sum[i];
        group_barrier(wn, WK * WAVE);
        ++flushes;
        float first = 0.f, second = 0.f;
        if (output.at >= 0) {
            const float* mine = partial + (inner >> 4) * WK * PARTIAL_STRIDE + (inner & 15);
#pragma unroll
            for (int w = 0; w < WK; ++w) first += mine[w * PARTIAL_STRIDE];
            if (a.activation == ACT_SILU_GATE)
#pragma unroll
                for (int w = 0; w < WK; ++w) second += mine[w * PARTIAL_STRIDE + 8];
        }
        if (plan.partial_buffers == 1) group_barrier(wn, WK * WAVE);
        output.store(a, first, second);
    }
    TRACE(4);
    if (a.dependent == 2) grid_release();
}
