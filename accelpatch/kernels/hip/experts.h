// One of the two products of a layer's experts for few tokens, over stacks of int4 tiles:
//
//     gate and up   h[T, k][I] = silu(gate) * up, of x[T, H] with the tiles of each of a token's experts
//     down          y[T, H] = sum over j of weights[T, j] * h[T, j] . down[ids[T, j]]^T (+ residual)
//
// As GemvArgs of one token: of gate and up n is 2 k I and k is H, of down n is H and k is k I; strides go from token to
// token. Blocks take a token each. The ids are read on the device: of gate and up behind the wait for the kernel
// before, and only then may the next begin, so that down reads them, and weights, while gate and up still run. An id
// outside of 0 .. E - 1 adds nothing: its row of h is never read.
#pragma once
#include "gemv_host.h"
#include "instances.h"

// Pointers and sizes only, beside GemvArgs.
struct ExpertArgs {
    const void* ids;      // int32 or int64 [tokens][chosen]
    const void* weights;  // of routing, [tokens][chosen]
    int64_t tokens, chosen, experts;
    int32_t ids_are_64, weight_type;  // weight_type: 0 float, 1 bf16, 2 fp16
    int32_t down;
};

DEVICE float number_of(const void* from, int at, int type) {
    if (type == 0) return bits_to_float(load_activation4(static_cast<const uint32_t*>(from) + at));
    const uint32_t bits = load_activation2(static_cast<const uint16_t*>(from) + at);
    return type == 1 ? Bf16::up(bits) : F16::up(bits);
}
// A token's experts into shared memory; every thread calls it.
DEVICE void read_routing(const GemvPlan& plan) {
    const ExpertPlan& e = plan.experts;
    Routing& routing = routing_of(plan);
    if (const int i = threadIdx.x; i <= e.chosen) {
        int number = -1;
        float weight = 0.f;
        if (i < e.chosen) {
            const int at = own_token(plan) * e.chosen + i;
            const uint32_t* id = static_cast<const uint32_t*>(e.ids) + (e.ids_are_64 ? 2 * at : at);
            const uint32_t low = load_activation4(id), high = e.ids_are_64 ? load_activation4(id + 1) : 0u;
            const float given = number_of(e.weights, at, e.weight_type);  // no load waits for another
            if (!high && low < uint32_t(e.experts)) number = int(low), weight = given;
        }
        routing.number[i] = number, routing.weight[i] = weight;
    }
    __syncthreads();
}

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
    if (!e.ids || !e.weights || !a.scale || (a.offset_kind != OFFSET_NONE && !a.offset)) return STATUS_POINTER;
    if (a.activation != (e.down ? ACT_NONE : ACT_SILU_GATE) || a.norm || a.bias) return STATUS_FORMAT;
    if (a.producer || a.consumer || a.group_shift < 0 || a.group_shift > 30) return STATUS_FORMAT;
    return check(a);
}

inline uint32_t inverse_of(int64_t n) { return n == 1 ? 0u : uint32_t((int64_t(1) << 32) / n + 1); }

// Where experts lie; before the rest of the plan. Whether its quotients are exact.
template <class F> bool plan_experts(ExpertPlan& p, const GemvArgs& a, const ExpertArgs& e, int blocks) {
    const int64_t of = e.chosen, tiles = a.n / 16 / (e.down ? 1 : of), steps = a.k / F::KSTEP / (e.down ? of : 1);
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
        return int(STATUS_FORMAT);
    });
}
