// Weights of a layer's experts: the tiles of all experts, one expert after another. Which of them a token needs is read
// on the device. To a block the experts of its token are a single weight: for gate and up their tiles follow each
// other, for down their steps along K. Only the addresses of a stage differ from those of a weight that is not in a
// stack.
#pragma once
#include "gemv/formats.h"

// Format F, in a stack of experts.
template <class F> struct Stacked : F {};
template <class F> constexpr bool STACKED = false;
template <class F> constexpr bool STACKED<Stacked<F>> = true;

constexpr int MOST_CHOSEN = 64;  // experts of a token
// A token's experts, in shared memory: their numbers in the stack, -1 where an id is out of range, and their routing
// weights. After the last one there is an entry of expert -1 and weight 0, for steps past the end of K.
struct Routing {
    int expert[MOST_CHOSEN + 1];
    float weight[MOST_CHOSEN + 1];
};
constexpr int MOST_SCORES = 1024;  // experts that a block can choose from
// Shared memory of the choice from a router's logits: the logits of the chosen experts, partial sums of the softmax,
// and all logits of the token. With SHARED_STAGES it is at the start of the multi-stage buffers: the choice ends with a
// barrier, and after that the first stages are prefetched.
struct Scores {
    float best[MOST_CHOSEN], partial_sums[THREADS / 32];
    alignas(16) float all[MOST_SCORES];
};
DEVICE Routing& routing_of(const GemvPlan& plan) {
    extern __shared__ __align__(128) char shared[];
    return *reinterpret_cast<Routing*>(shared + plan.experts.routing_at);
}
DEVICE Scores& scores_of(const GemvPlan& plan) {
    extern __shared__ __align__(128) char shared[];
    return *reinterpret_cast<Scores*>(shared + plan.experts.scores_at);
}

// The token that this block computes. GemvArgs have one token, so that the kernel's own index of it is 0.
DEVICE int token_of_block(const GemvPlan& plan) { return int(blockIdx.x) / plan.experts.blocks; }
// The row of x, y and the residual, for the kernel's index of a token.
template <class F> DEVICE int row_of_token(const GemvPlan& plan, int token) {
    return STACKED<F> ? token_of_block(plan) : token;
}

// v / n, where `inverse` is 2^32 / n + 1 rounded down, or 0 for n = 1. Exact while v * n is below 2^32.
DEVICE int quotient(int v, uint32_t inverse) { return inverse ? int(uint64_t(uint32_t(v)) * inverse >> 32) : v; }

// A step of a tile, as an index into the steps of the whole stack, and its set of scales among those of the stack.
struct StackPlace {
    int64_t step, set;
};
DEVICE StackPlace place_in_stack(const GemvArgs& a, const GemvPlan& plan, int tile, int step) {
    const ExpertPlan& e = plan.experts;
    const int by_tile = quotient(tile, e.tile_inverse), by_step = quotient(step, e.step_inverse),
              expert = max(routing_of(plan).expert[by_tile + by_step], 0), own_step = step - by_step * e.steps;
    const int64_t stack_tile = int64_t(expert) * e.tiles + (tile - by_tile * e.tiles);
    return {stack_tile * e.steps + own_step, stack_tile * e.sets + (own_step >> a.group_shift)};
}
// For down, whether the expert of a step of K is in the stack, and the routing weight that its products are multiplied
// by. For gate and up true and 1: the expert does not depend on the step, and the weight is applied in down.
DEVICE bool has_expert(const GemvPlan& plan, int step) {
    return !plan.experts.down || routing_of(plan).expert[quotient(step, plan.experts.step_inverse)] >= 0;
}
DEVICE float step_weight(const GemvPlan& plan, int step) {
    return plan.experts.down ? routing_of(plan).weight[quotient(step, plan.experts.step_inverse)] : 1.f;
}
