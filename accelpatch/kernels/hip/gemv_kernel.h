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

// What expand() takes off this lane's row h.
template <class F, class T, class SLOT> DEVICE Taken taken(const SLOT& slot, const GemvArgs& a, int group, int h) {
    if constexpr (!F::TAKES) return F::taken(0.f);
    else return F::taken(table_value(FragmentFor<F, T>::OWN_ROWS ? slot.offset[group] : slot.own_offset[group], fragment_half(h), a.scale_is_bf16));
}
// A group's products into the totals, times its scale; with a float minimum, the sum of activations times what expand()
// left of it.
template <class F, class FRAGMENT, class SLOT>
DEVICE void add_group(FRAGMENT& total, const FRAGMENT& part, const SLOT& slot, const GemvArgs& a, const float* group_sums, int group) {
    float scale[FRAGMENT::SCALES], rest[FRAGMENT::SCALES], sums[FRAGMENT::TOKENS];
    if constexpr (F::SUMS) load_floats<FRAGMENT::TOKENS>(sums, group_sums);
#pragma unroll
    for (int j = 0; j < FRAGMENT::SCALES; ++j) {
        const int word = FRAGMENT::scale_word(j, F::GROUPS, group), half = FRAGMENT::scale_half(j);
        scale[j] = table_value(slot.scale[word], half, a.scale_is_bf16);
        if constexpr (F::SUMS) {
            const float minimum = table_value(slot.offset[word], half, a.scale_is_bf16);
            rest[j] = F::rest(scale[j], minimum) * FRAGMENT::sum_share();
        }
    }
#pragma unroll
    for (int i = 0; i < FRAGMENT::SIZE; ++i) {
        const int j = FRAGMENT::scale_of(i);
        total.sum[i] = fmaf(part.sum[i], scale[j], total.sum[i]);
        if constexpr (F::SUMS) total.sum[i] = fmaf(sums[i % FRAGMENT::TOKENS], rest[j], total.sum[i]);
    }
}

// Adds one step to a tile's sums; `lane` is where this lane's activations of the step begin, `sums` the step's sums.
template <class F, class T, class FRAGMENT, class SLOT>
DEVICE void accumulate(FRAGMENT& total, const SLOT& slot, const GemvArgs& a, const GemvPlan& plan, const char* lane, const float* step_sums) {
    const int tokens = int(a.m);
    FRAGMENT part;
    if constexpr (F::GROUPS > 0) part.zero();
#pragma unroll
    for (int p = 0; p < F::SUB; ++p) {
        constexpr int EACH = F::GROUPS ? F::SUB / F::GROUPS : F::SUB;
        const int group = p / EACH;
        const char* chunk = lane + F::chunk(p, 0) * 16;
        Words4 w[ROWS_PER_LANE];
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) w[h] = F::expand(slot.w[h], p, taken<F, T>(slot, a, group, h));
        if constexpr (F::GROUPS == 0) {
            total.add(w, chunk, plan.token_stride, tokens);
        } else {
            part.add(w, chunk, plan.token_stride, tokens);
            if ((p + 1) % EACH != 0) continue;
            part.gather();
            add_group<F>(total, part, slot, a, step_sums + group * 8, group);
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
    // `undo`: what the token's activations were divided by.
    DEVICE void store(const GemvArgs& a, float first, float second, float undo) const {
        if (at < 0) return;
        float v = activate(first * scale[0] * undo + T::up(bias[0]), a.activation);
        if (a.activation == ACT_SILU_GATE) v *= second * scale[1] * undo + T::up(bias[1]);
        static_cast<uint16_t*>(a.y)[at] = static_cast<uint16_t>(T::down(v + T::up(residual)));
    }
};

// The products with a token's values that are not finite: they alone decide what its sum comes to.
template <class F, class T, class STAGER>
DEVICE float unbounded_sum(const GemvArgs& a, const GemvPlan& plan, const STAGER& stager, int tile, int r, int token) {
    const int sets = ((plan.steps - 1) >> a.group_shift) + 1;
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < int(a.k); ++k) {
        const float x = stager.staged_value(token, k);
        if (fabsf(x) < INFINITY) continue;
        const int step = k / F::KSTEP, group = k % F::KSTEP / (F::KSTEP / F::GROUPS);
        const int64_t at = ((int64_t(tile) * sets + (step >> a.group_shift)) * 8 + r % 8) * F::GROUPS + group;
        const float scale = table_value(static_cast<const uint32_t*>(a.scale)[at], r / 8, a.scale_is_bf16);
        const float minimum = table_value(static_cast<const uint32_t*>(a.offset)[at], r / 8, a.scale_is_bf16);
        sum += x * fmaf(F::code(static_cast<const uint32_t*>(a.w) + int64_t(tile) * plan.steps * (F::STEP_BYTES / 4), r, k), scale, minimum);
    }
    return sum;
}

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

template <class F, class T> __global__ void __launch_bounds__(THREADS, ACCELPATCH_MMA_MIN_BLOCKS) gemv_kernel(const GemvArgs a, const GemvPlan plan) {
    using Fragment = FragmentFor<F, T>;
    using Flow = Stream<F, T>;
    constexpr int RING_UNROLL = Flow::RING_UNROLL, PAIR = Flow::PAIR;
    extern __shared__ __align__(128) char shared[];
    // WK waves share a tile, WN tiles are under way; a tile's first 128 threads finish its 16 rows and 8 tokens.
    const int WK = 1 << plan.waves_shift, WN = WAVES >> plan.waves_shift;
    const int wave = threadIdx.x / WAVE, wk = wave & (WK - 1), wn = wave >> plan.waves_shift, inner = threadIdx.x & (WK * WAVE - 1);
    TRACE(0);
    if (a.dependent != 2) grid_release();

    Flow flow(a, plan, wk, wn);
#if ACCELPATCH_AMD
    typename Flow::Slot ring[RING_UNROLL][PAIR];
#else
    constexpr int SLOT = PAIR * SLOT_BYTES<F>;
    int slot = 0;
    const int ring_bytes = plan.depth * SLOT;
    char* ring = shared + pinned(plan.ring_at + wave * ring_bytes + lane_id() * 16);
#endif
    const auto fill = [&] {
#if ACCELPATCH_AMD
#pragma unroll
        for (int u = 0; u < RING_UNROLL; ++u) flow.issue(ring[u]);
#else
        for (slot = 0; slot < ring_bytes; slot += SLOT) flow.issue(ring + slot);
        slot = 0;
#endif
    };
    fill();
    Stager<F, T, THREADS> stager(a, plan, shared);
    TRACE(1);
    grid_wait();
    TRACE(2);
    const bool all = plan.resident == plan.phases;
    bool staged = false;
    const int lane_at = pinned(Fragment::column(int(a.m)) * plan.token_stride + F::chunk(0, fragment_quarter()) * 16);
    const int sums_at = pinned(plan.sums_at + (Fragment::token(0) & 7) * 4);
    for (int round = 0; Flow::tile_of(plan, round, 0) < plan.tiles; ++round) {
        const Output<F, T> output(a, plan, Flow::tile_of(plan, round, wn), inner);
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
            const int valid = Flow::tile_of(plan, round, wn) < plan.tiles ? Flow::valid_turns(plan, phase, wk) : 0, n = Flow::whole_turns(valid);
            const int first = (all ? phase * plan.phase_steps : 0) + wk * PAIR;
            const char* x = shared + (lane_at + first * F::SUB * 64);
            const float* sums = reinterpret_cast<const float*>(shared + (sums_at + first * F::GROUPS * 32));
#pragma unroll 1
            for (int i = 0; i < n; i += RING_UNROLL) {
#pragma unroll
                for (int turn = 0; turn < RING_UNROLL; ++turn) {
#if ACCELPATCH_AMD
                    typename Flow::Slot(&now)[PAIR] = ring[turn];
#else
                    char* here = ring + slot;
                    slot = slot + SLOT == ring_bytes ? 0 : slot + SLOT;
                    ring_wait(plan.depth == 4);
                    typename Flow::Slot now[PAIR];
#pragma unroll
                    for (int u = 0; u < PAIR; ++u) flow.read(now[u], here + u * SLOT_BYTES<F>);
                    flow.issue(here);
#endif
                    if (RING_UNROLL == 1 || i + turn < valid) {
#pragma unroll
                        for (int u = 0; u < PAIR; ++u) accumulate<F, T>(total, now[u], a, plan, x + u * F::SUB * 64, sums + u * F::GROUPS * 8);
                    }
                    x += flow.stride() * F::SUB * 64, sums += flow.stride() * F::GROUPS * 8;
#if ACCELPATCH_AMD
                    flow.issue(now);
#endif
                }
            }
        }
        if (!all && round == 0 && stager.must_repeat()) {  // nothing is stored yet
            wait_all(), flow.restart(), fill();
            round = -1;
            continue;
        }
        total.finish();
        // [token][wave][PARTIAL_STRIDE]
        const int buffer = plan.partial_buffers - 1 & round;
        float* partial = reinterpret_cast<float*>(shared + plan.partial_at) + (buffer * WN + wn) * int(a.m) * WK * PARTIAL_STRIDE;
#pragma unroll
        for (int i = 0; i < Fragment::SIZE; ++i)
            if (Fragment::owns(i) && Fragment::token(i) < a.m) partial[(Fragment::token(i) * WK + wk) * PARTIAL_STRIDE + Fragment::row(i)] = total.sum[i];
        group_barrier(wn, WK * WAVE);
        float first = 0.f, second = 0.f;
        if (output.at >= 0) {
            const float* mine = partial + (inner >> 4) * WK * PARTIAL_STRIDE + (inner & 15);
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
                if (w < WK) first += mine[w * PARTIAL_STRIDE];
            if (a.activation == ACT_SILU_GATE)
#pragma unroll
                for (int w = 0; w < WAVES; ++w)
                    if (w < WK) second += mine[w * PARTIAL_STRIDE + 8];
        }
        if (plan.partial_buffers == 1) group_barrier(wn, WK * WAVE);
        if constexpr (F::SUMS) {
            if (const int token = inner >> 4; output.at >= 0 && stager.unbounded(token)) {
                first = unbounded_sum<F, T>(a, plan, stager, Flow::tile_of(plan, round, wn), inner & 15, token);
                second = unbounded_sum<F, T>(a, plan, stager, Flow::tile_of(plan, round, wn), (inner & 7) + 8, token);
            }
        }
        output.store(a, first, second, stager.undo(inner >> 4 & 7));
    }
    TRACE(4);
    if (a.dependent == 2) grid_release();
}
