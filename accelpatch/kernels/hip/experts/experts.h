// One of the two linear layers of a layer's experts for few tokens, over stacks of 4-bit tiles:
//
//     gate and up   h[T, k][I] = silu(gate) * up, of x[T, H] and the weights of each of a token's k experts
//     down          y[T, H] = sum over j of weights[T, j] * h[T, j] . down[ids[T, j]]^T (+ residual)
//
// A launch has the GemvArgs of one token: for gate and up N is 2 k I and K is H, for down N is H and K is k I. Strides
// are from one token to the next. Gate and up may apply an RMSNorm to x. Each block computes for one token.
//
// The ids and routing weights are in device memory. Or each block chooses its token's experts itself, from the logits
// of the router. The kernel before may have written any of these. Gate and up therefore wait for its end before they
// read them, and let the next launch start after that wait only: down then reads them while gate and up still run. An
// id outside of 0 .. E - 1 adds nothing: down does not read its row of h.
#pragma once
#include "instances.h"
#include "routing.h"

// Pointers and sizes only, in addition to GemvArgs.
struct ExpertArgs {
    const void* ids;                  // int32 or int64 [tokens][chosen], or null
    const void* weights;              // of the router, [tokens][chosen], or null
    const void* logits;               // of the router, [tokens][experts], in place of ids and weights, or null
    int64_t tokens, chosen, experts;  // chosen: experts a token (top-k); experts: in the stack
    int32_t ids_are_64, weight_type;  // weight_type: the dtype of weights or logits: 0 float, 1 bf16, 2 fp16
    int32_t down;                     // 1: the down projection; 0: gate and up
    // Of the weights that are computed from logits. normalise: the weights of a token's experts add up to one. narrow:
    // they are rounded to the logits' dtype.
    int32_t normalise, narrow;
};

// The template parameters are those of gemv_kernel.
template <class F, class T, bool NARROW, int DEPTH>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT) experts_kernel(const GemvArgs a, const GemvPlan plan) {
    extern __shared__ __align__(128) char shared[];
    if (!plan.experts.down) grid_wait();
    grid_release();
    stage_routing(plan);
    multiply_block<F, T, NARROW, DEPTH>(a, plan, shared);
}

inline int check_experts(const GemvArgs& a, const ExpertArgs& e) {
    const int64_t all = e.down ? a.k : a.n, each = e.chosen > 0 ? all / e.chosen : 0;  // of all experts; of one
    if (a.m != 1 || e.tokens < 1 || e.chosen < 1 || e.chosen > MOST_CHOSEN || e.experts < 1) return STATUS_SIZE;
    if (e.tokens >= LARGEST / MOST_CHOSEN || e.experts >= LARGEST || all % e.chosen || a.k % 128) return STATUS_SIZE;
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

// What quotient() takes for a division by n.
inline uint32_t inverse_of(int64_t n) { return n == 1 ? 0u : uint32_t((int64_t(1) << 32) / n + 1); }

// Fills in the plan's part for experts. Precondition: it comes before make_plan, whose layout depends on this part.
// blocks: of a token. Returns whether quotient() is exact for all tiles and steps.
template <class F> bool plan_experts(ExpertPlan& p, const GemvArgs& a, const ExpertArgs& e, int blocks) {
    const int64_t chosen = e.chosen, tiles = a.n / 16 / (e.down ? 1 : chosen),
                  steps = a.k / F::KSTEP / (e.down ? chosen : 1);
    p.logits = e.logits, p.normalise = e.normalise, p.narrow = e.narrow;
    while (p.lanes_shift < 5 && e.experts << (p.lanes_shift + 1) <= THREADS && 4 << p.lanes_shift < e.experts)
        ++p.lanes_shift;
    p.ids = e.ids, p.weights = e.weights, p.ids_are_64 = e.ids_are_64, p.weight_type = e.weight_type, p.down = e.down;
    p.chosen = int32_t(chosen), p.experts = int32_t(e.experts), p.blocks = blocks;
    p.tiles = int32_t(tiles), p.steps = int32_t(steps), p.sets = int32_t(((steps - 1) >> a.group_shift) + 1);
    p.tile_inverse = inverse_of(tiles), p.step_inverse = inverse_of(steps);
    return tiles * tiles * chosen < int64_t(1) << 32 && steps * steps * chosen < int64_t(1) << 32;
}

template <class F, class T> int launch_experts(const GemvArgs& a, const ExpertArgs& e, GpuStream stream) {
    if (const int bad = check_experts(a, e)) return bad;
    const DeviceLimits limits = device_limits();
    constexpr bool NARROW = NARROW_TOKENS > 0;
    static_assert(!SHARED_STAGES || SHALLOW * PAIR<F> * SLOT_BYTES<F> * WARPS >= sizeof(Scores));
    const int64_t blocks = a.blocks > 0 ? a.blocks : int64_t(limits.sms) * BLOCKS_LAUNCHED,
                  each = blocks > e.tokens ? blocks / e.tokens : 1;  // of a token
    GemvPlan plan = {};
    if (!plan_experts<F>(plan.experts, a, e, int(each))) return STATUS_SIZE;
    const int depth = make_plan<F, T>(plan, a, limits, int(each), NARROW ? Form::NARROW : Form::WIDE);
    if (!depth) return STATUS_MEMORY;
    const auto kernel = depth == DEEP ? experts_kernel<F, T, NARROW, DEEP> : experts_kernel<F, T, NARROW, SHALLOW>;
    const int error =
        launch_kernel(kernel, int(each * e.tokens), THREADS, plan.bytes, stream, limits, a.dependent >= 0, a, plan);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

// GROUPS: scales of a step, as in gemv_int4.h. dtype: of activations, 0 bf16, 1 fp16.
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
