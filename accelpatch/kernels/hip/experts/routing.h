// Brings a token's experts and their routing weights into shared memory: loads them, or chooses them from the logits of
// the router.
#pragma once
#include "gemv/gemv_host.h"

// Element `at` of an array; type: as ExpertArgs::weight_type.
DEVICE float load_value(const void* from, int at, int type) {
    if (type == 0) return bits_to_float(load_activation4(static_cast<const uint32_t*>(from) + at));
    const uint32_t bits = load_activation2(static_cast<const uint16_t*>(from) + at);
    return type == 1 ? Bf16::up(bits) : F16::up(bits);
}
// A value rounded to such a type.
DEVICE float rounded_to(float value, int type) {
    return type == 0 ? value : type == 1 ? Bf16::up(Bf16::down(value)) : F16::up(F16::down(value));
}

// Loads a token's ids and weights. Precondition: all threads of the block call it. It ends with a barrier.
DEVICE void load_routing(const ExpertPlan& e, Routing& routing, int token) {
    if (const int i = threadIdx.x; i <= e.chosen) {
        int expert = -1;
        float weight = 0.f;
        if (i < e.chosen) {
            const int at = token * e.chosen + i;
            const uint32_t* id = static_cast<const uint32_t*>(e.ids) + (e.ids_are_64 ? 2 * at : at);
            const uint32_t low = load_activation4(id), high = e.ids_are_64 ? load_activation4(id + 1) : 0u;
            const float given = load_value(e.weights, at, e.weight_type);  // before the test: all loads overlap
            if (!high && low < uint32_t(e.experts)) expert = int(low), weight = given;
        }
        routing.expert[i] = expert, routing.weight[i] = weight;
    }
    __syncthreads();
}

// Computes the routing weights of the chosen experts: a softmax over all logits, or with `normalise` over theirs alone.
// Precondition: scores.best has their logits, the largest first, scores.all has all logits, a barrier has followed, and
// all threads of the block call it. It ends with a barrier.
DEVICE void softmax_weights(const ExpertPlan& e, Routing& routing, Scores& scores) {
    const auto exponential = [&](float score) { return fast_exp2((score - scores.best[0]) * 1.44269504088896f); };
    if (!e.normalise) {
        float part = 0.f;
        for (int i = threadIdx.x; i < e.experts; i += THREADS) part += exponential(scores.all[i]);
        part = run_sum(part, 32);
        if (threadIdx.x % 32 == 0) scores.partial_sums[threadIdx.x / 32] = part;
        __syncthreads();
    }
    if (const int i = threadIdx.x; i < e.chosen) {
        float sum = 0.f;
        for (int j = 0; j < (e.normalise ? e.chosen : THREADS / 32); ++j)
            sum += e.normalise ? exponential(scores.best[j]) : scores.partial_sums[j];
        const float weight = exponential(scores.best[i]) / sum;
        routing.weight[i] = e.narrow ? rounded_to(weight, e.weight_type) : weight;
    }
    __syncthreads();
}

// Chooses the experts of a token's largest logits, the largest first. NaN counts as infinity; of equal logits the
// expert with the lower number comes first. The rank of a logit is the number of logits that come before it, which
// 2^lanes_shift lanes count: there is no pass for each chosen expert. Down computes the weights too. Precondition: all
// threads of the block call it. It ends with a barrier.
DEVICE void choose_experts(const GemvPlan& plan, Routing& routing, int token) {
    const ExpertPlan& e = plan.experts;
    Scores& scores = scores_of(plan);
    for (int i = threadIdx.x; i < ((e.experts + 3) & ~3); i += THREADS) {
        const float score = i < e.experts ? load_value(e.logits, token * e.experts + i, e.weight_type) : -INFINITY;
        scores.all[i] = score == score ? score : INFINITY;
    }
    __syncthreads();
    const int lanes = 1 << e.lanes_shift, lane = threadIdx.x & (lanes - 1);
#pragma unroll 1
    for (int begin = 0; begin < e.experts; begin += THREADS >> e.lanes_shift) {
        const int i = begin + (threadIdx.x >> e.lanes_shift);
        const float own = scores.all[min(i, e.experts - 1)];
        int rank = 0;
#pragma unroll 2
        for (int at = lane * 4; at < e.experts; at += lanes * 4) {
            float other[4];
            load_floats<4>(other, scores.all + at);
#pragma unroll
            for (int j = 0; j < 4; ++j) rank += other[j] > own || (other[j] == own && at + j < i);
        }
        rank = run_sum(rank, lanes);
        if (lane == 0 && i < e.experts && rank < e.chosen) routing.expert[rank] = i, scores.best[rank] = own;
    }
    if (threadIdx.x == 0) routing.expert[e.chosen] = -1, routing.weight[e.chosen] = 0.f;
    __syncthreads();
    if (e.down) softmax_weights(e, routing, scores);
}

// Brings the routing of the block's token into shared memory. Precondition: all threads of the block call it. It ends
// with a barrier.
DEVICE void stage_routing(const GemvPlan& plan) {
    if (plan.experts.logits) choose_experts(plan, routing_of(plan), token_of_block(plan));
    else load_routing(plan.experts, routing_of(plan), token_of_block(plan));
}
