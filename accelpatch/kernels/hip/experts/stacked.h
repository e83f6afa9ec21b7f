// Weights of a layer's experts: one expert's tiles after the other's, and which of them a token needs is read on the
// device. To its block a token's experts are one weight: of gate and up their tiles follow each other, of down their
// steps of K. Only the addresses of a stage differ from those of a weight by itself.
#pragma once
#include "gemv/formats.h"

template <class F> struct Stacked : F {};
template <class F> constexpr bool STACKED = false;
template <class F> constexpr bool STACKED<Stacked<F>> = true;

constexpr int MOST_CHOSEN = 64;
// A token's experts, in shared memory: their numbers, -1 for one that is not there, and weights; behind them one that
// is not there, for steps past the last.
struct Routing {
    int number[MOST_CHOSEN + 1];
    float weight[MOST_CHOSEN + 1];
};
// What a choice takes of shared memory, where the multi-stage buffer lies later: the logits of those that are chosen,
// parts of a sum, all logits of a token.
constexpr int MOST_SCORES = 1024;  // experts that are chosen from
struct Scores {
    float best[MOST_CHOSEN], parts[THREADS / 32];
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

// The token that a block takes: to it the only one, number 0.
DEVICE int own_token(const GemvPlan& plan) { return int(blockIdx.x) / plan.experts.blocks; }
template <class F> DEVICE int row_of_token(const GemvPlan& plan, int token) {
    return STACKED<F> ? own_token(plan) : token;
}

// v / n for an `inverse` of n, 2^32 / n + 1 rounded down, or 0 of n = 1: exact while v * n is below 2^32.
DEVICE int quotient(int v, uint32_t inverse) { return inverse ? int(uint64_t(uint32_t(v)) * inverse >> 32) : v; }

// Where a tile's step lies among the steps of all the stack, and its scales among the sets of all.
struct StackPlace {
    int64_t step, set;
};
DEVICE StackPlace place_in_stack(const GemvArgs& a, const GemvPlan& plan, int tile, int step) {
    const ExpertPlan& e = plan.experts;
    const int by_tile = quotient(tile, e.tile_inverse), by_step = quotient(step, e.step_inverse),
              expert = max(routing_of(plan).number[by_tile + by_step], 0), own = step - by_step * e.steps;
    const int64_t of = int64_t(expert) * e.tiles + (tile - by_tile * e.tiles);
    return {of * e.steps + own, of * e.sets + (own >> a.group_shift)};
}
// Whether a step of K is an expert's that is there, and what its sums are multiplied by. Gate and up have neither.
DEVICE bool step_there(const GemvPlan& plan, int step) {
    return !plan.experts.down || routing_of(plan).number[quotient(step, plan.experts.step_inverse)] >= 0;
}
DEVICE float step_weight(const GemvPlan& plan, int step) {
    return plan.experts.down ? routing_of(plan).weight[quotient(step, plan.experts.step_inverse)] : 1.f;
}
