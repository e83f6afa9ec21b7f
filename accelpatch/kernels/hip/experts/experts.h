// One of the two products of a layer's experts for few tokens, over stacks of 4-bit tiles:
//
//     gate and up   h[T, k][I] = silu(gate) * up, of x[T, H] with the tiles of each of a token's experts
//     down          y[T, H] = sum over j of weights[T, j] * h[T, j] . down[ids[T, j]]^T (+ residual)
//
// As GemvArgs of one token: of gate and up n is 2 k I and k is H, of down n is H and k is k I; strides go from token to
// token. Gate and up may take a norm of x into themselves. Blocks take a token each. Ids are read on the device, or
// chosen by each block for itself of its token's logits, which the kernel before has written: of gate and up behind
// the wait for that kernel, and only then may the next begin, so that down reads the same, and weights, while gate and
// up still run. An id outside of 0 .. E - 1 adds nothing: its row of h is never read.
#pragma once
#include "instances.h"
#include "routing.h"

// Pointers and sizes only, in addition to GemvArgs.
struct ExpertArgs {
    const void* ids;      // int32 or int64 [tokens][chosen], or null
    const void* weights;  // of routing, [tokens][chosen], or null
    const void* logits;   // of a router, [tokens][experts], in place of both, or null
    int64_t tokens, chosen, experts;
    int32_t ids_are_64, weight_type;  // weight_type: of weights or logits: 0 float, 1 bf16, 2 fp16
    int32_t down;
    int32_t normalise, narrow;  // weights of logits: they add up to one; they are rounded to the logits' dtype
};

template <class F, class T, bool NARROW, int DEPTH>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT) experts_kernel(const GemvArgs a, const GemvPlan plan) {
    extern __shared__ __align__(128) char shared[];
    if (!plan.experts.down) grid_wait();
    grid_release();
    read_routing(plan);
    multiply_block<F, T, NARROW, DEPTH>(a, plan, shared);
}

inline int check_experts(const GemvArgs& a, const ExpertArgs& e) {
    const int64_t part = e.down ? a.k : a.n, each = e.chosen > 0 ? part / e.chosen : 0;
    if (a.m != 1 || e.tokens < 1 || e.chosen < 1 || e.chosen > MOST_CHOSEN || e.experts < 1) return STATUS_SIZE;
    if (e.tokens >= LARGEST / MOST_CHOSEN || e.experts >= LARGEST || part % e.chosen || a.k % 128) return STATUS_SIZE;
    if (each % (e.down ? 128 : 16) || a.n % 16) return STATUS_SIZE;
    if (e.logits && (e.experts > MOST_SCORES || e.chosen > e.experts || e.tokens * e.experts >= LARGEST))
        return STATUS_SIZE;
    if (e.logits ? e.ids || e.weights : !e.ids || !e.weights) return STATUS_POINTER;
    if (e.weight_type < 0 || e.weight_type > 2) return STATUS_FORMAT;
    if (!a.scale || (two_tables(a.offset_kind) && !a.offset)) return STATUS_POINTER;
    if (a.activation != (e.down ? ACT_NONE : ACT_SILU_GATE) || a.bias) return STATUS_FORMAT;
    if (a.norm != NORM_NONE && (e.down || (a.norm != NORM_RMS && a.norm != NORM_RMS_PLUS_ONE))) return STATUS_FORMAT;
    if (a.producer || a.consumer || a.group_shift < 0 || a.group_shift > 30) return STATUS_FORMAT;
    return check(a);
}

inline uint32_t inverse_of(int64_t n) { return n == 1 ? 0u : uint32_t((int64_t(1) << 32) / n + 1); }

// Where experts lie; before the rest of the plan. Whether its quotients are exact.
template <class F> bool plan_experts(ExpertPlan& p, const GemvArgs& a, const ExpertArgs& e, int blocks) {
    const int64_t of = e.chosen, tiles = a.n / 16 / (e.down ? 1 : of), steps = a.k / F::KSTEP / (e.down ? of : 1);
    p.logits = e.logits, p.normalise = e.normalise, p.narrow = e.narrow;
    while (p.lanes_shift < 5 && e.experts << (p.lanes_shift + 1) <= THREADS && 4 << p.lanes_shift < e.experts)
        ++p.lanes_shift;
    p.ids = e.ids, p.weights = e.weights, p.ids_are_64 = e.ids_are_64, p.weight_type = e.weight_type, p.down = e.down;
    p.chosen = int32_t(of), p.experts = int32_t(e.experts), p.blocks = blocks;
    p.tiles = int32_t(tiles), p.steps = int32_t(steps), p.sets = int32_t(((steps - 1) >> a.group_shift) + 1);
    p.tile_inverse = inverse_of(tiles), p.step_inverse = inverse_of(steps);
    return tiles * tiles * of < int64_t(1) << 32 && steps * steps * of < int64_t(1) << 32;
}

template <class F, class T> int launch_experts(const GemvArgs& a, const ExpertArgs& e, GpuStream stream) {
    if (const int bad = check_experts(a, e)) return bad;
    const DeviceLimits limits = device_limits();
    constexpr bool NARROW = NARROW_TOKENS > 0;
    static_assert(!SHARED_STAGES || SHALLOW * PAIR<F> * SLOT_BYTES<F> * WARPS >= sizeof(Scores));
    const int64_t all = a.blocks > 0 ? a.blocks : int64_t(limits.sms) * BLOCKS_LAUNCHED,
                  each = all > e.tokens ? all / e.tokens : 1;
    GemvPlan plan = {};
    if (!plan_experts<F>(plan.experts, a, e, int(each))) return STATUS_SIZE;
    const int depth = make_plan<F, T>(plan, a, limits, int(each), NARROW ? Form::NARROW : Form::WIDE);
    if (!depth) return STATUS_MEMORY;
    const auto kernel = depth == DEEP ? experts_kernel<F, T, NARROW, DEEP> : experts_kernel<F, T, NARROW, SHALLOW>;
    const int error =
        launch_kernel(kernel, int(each * e.tokens), THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

// GROUPS: as in gemv_int4.h. dtype: 0 bf16, 1 fp16 activations.
template <int GROUPS> int int4_experts(const GemvArgs& a, const ExpertArgs& e, int dtype, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        if constexpr (HAS<OFFSET_NONE>) {
            if (a.offset_kind == OFFSET_NONE) return launch_experts<Stacked<Int4<GROUPS, OFFSET_NONE>>, T>(a, e, s);
        }
        if constexpr (HAS<OFFSET_MINIMUM>) {
            if (a.offset_kind == OFFSET_MINIMUM)
                return launch_experts<Stacked<Int4<GROUPS, OFFSET_MINIMUM>>, T>(a, e, s);
        }
        if constexpr (GROUPS == 4 && HAS<OFFSET_E2M1>) {
            if (a.offset_kind == OFFSET_E2M1)
                return launch_experts<Stacked<Codebook4<GROUPS, OFFSET_E2M1>>, T>(a, e, s);
        }
        return int(STATUS_FORMAT);
    });
}
