// A token's experts and their weights into shared memory: as they are given, or chosen here from a router's logits.
#pragma once
#include "gemv/gemv_host.h"

DEVICE float number_of(const void* from, int at, int type) {
    if (type == 0) return bits_to_float(load_activation4(static_cast<const uint32_t*>(from) + at));
    const uint32_t bits = load_activation2(static_cast<const uint16_t*>(from) + at);
    return type == 1 ? Bf16::up(bits) : F16::up(bits);
}
DEVICE float rounded_to(float value, int type) {
    return type == 0 ? value : type == 1 ? Bf16::up(Bf16::down(value)) : F16::up(F16::down(value));
}

DEVICE void read_given(const ExpertPlan& e, Routing& routing, int token) {
    if (const int i = threadIdx.x; i <= e.chosen) {
        int number = -1;
        float weight = 0.f;
        if (i < e.chosen) {
            const int at = token * e.chosen + i;
            const uint32_t* id = static_cast<const uint32_t*>(e.ids) + (e.ids_are_64 ? 2 * at : at);
            const uint32_t low = load_activation4(id), high = e.ids_are_64 ? load_activation4(id + 1) : 0u;
            const float given = number_of(e.weights, at, e.weight_type);  // no load waits for another
            if (!high && low < uint32_t(e.experts)) number = int(low), weight = given;
        }
        routing.number[i] = number, routing.weight[i] = weight;
    }
    __syncthreads();
}

// Weights of the chosen ones, whose logits are `best`, the largest first: a softmax over all logits, or over these.
DEVICE void weigh(const ExpertPlan& e, Routing& routing, Scores& scores) {
    const auto power = [&](float score) { return fast_exp2((score - scores.best[0]) * 1.44269504088896f); };
    if (!e.normalise) {
        float part = 0.f;
        for (int i = threadIdx.x; i < e.experts; i += THREADS) part += power(scores.all[i]);
        part = run_sum(part, 32);
        if (threadIdx.x % 32 == 0) scores.parts[threadIdx.x / 32] = part;
        __syncthreads();
    }
    if (const int i = threadIdx.x; i < e.chosen) {
        float sum = 0.f;
        for (int j = 0; j < (e.normalise ? e.chosen : THREADS / 32); ++j)
            sum += e.normalise ? power(scores.best[j]) : scores.parts[j];
        const float weight = power(scores.best[i]) / sum;
        routing.weight[i] = e.narrow ? rounded_to(weight, e.weight_type) : weight;
    }
    __syncthreads();
}

// The largest logits in their order, NaN as infinity, of equal ones the first. A logit's place is the number of those
// that go before it, counted by a few lanes: nothing is done once for each that is chosen.
DEVICE void choose(const GemvPlan& plan, Routing& routing, int token) {
    const ExpertPlan& e = plan.experts;
    Scores& scores = scores_of(plan);
    for (int i = threadIdx.x; i < ((e.experts + 3) & ~3); i += THREADS) {
        const float score = i < e.experts ? number_of(e.logits, token * e.experts + i, e.weight_type) : -INFINITY;
        scores.all[i] = score == score ? score : INFINITY;
    }
    __syncthreads();
    const int lanes = 1 << e.lanes_shift, lane = threadIdx.x & (lanes - 1);
#pragma unroll 1
    for (int begin = 0; begin < e.experts; begin += THREADS >> e.lanes_shift) {
        const int i = begin + (threadIdx.x >> e.lanes_shift);
        const float own = scores.all[min(i, e.experts - 1)];
        int before = 0;
#pragma unroll 2
        for (int at = lane * 4; at < e.experts; at += lanes * 4) {
            float other[4];
            load_floats<4>(other, scores.all + at);
#pragma unroll
            for (int j = 0; j < 4; ++j) before += other[j] > own || (other[j] == own && at + j < i);
        }
        before = run_sum(before, lanes);
        if (lane == 0 && i < e.experts && before < e.chosen) routing.number[before] = i, scores.best[before] = own;
    }
    if (threadIdx.x == 0) routing.number[e.chosen] = -1, routing.weight[e.chosen] = 0.f;
    __syncthreads();
    if (e.down) weigh(e, routing, scores);
}

// Every thread calls it, and may read the token's routing when it returns.
DEVICE void read_routing(const GemvPlan& plan) {
    if (plan.experts.logits) choose(plan, routing_of(plan), own_token(plan));
    else read_given(plan.experts, routing_of(plan), own_token(plan));
}
