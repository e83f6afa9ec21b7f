// The sums of each group of staged activations, which a float minimum is multiplied by.
#pragma once
#include "fragment.h"
#include "gemv.h"

template <class T> DEVICE void unpack(const Words4& v, float* out) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = T::up(w[i] & 0xffffu), out[2 * i + 1] = T::up_high(w[i]);
}

constexpr uint32_t UNBOUNDED = 1u << 16;  // the vote against token 0

// Of `chunks` staged chunks a token, as the products will see them, to sums[group * 8 + token] by all THREADS threads.
// Returns a thread's votes: UNBOUNDED << token where it saw a sum that is not finite.
template <class F, class OPERAND, int THREADS> DEVICE uint32_t add_groups(const char* shared, const GemvPlan& plan, int tokens, float* sums, int chunks) {
    constexpr int WIDTH = 16 / (F::GROUPS ? F::GROUPS : 1);  // chunks a group and step
    uint32_t found = 0;
#if ACCELPATCH_AMD
    const int end = (chunks + 31) / 32 * 32;  // all lanes of a run
#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
#pragma unroll 1
        for (int c = threadIdx.x; c < end; c += THREADS) {
            float v[8] = {};
            if (c < chunks) unpack<OPERAND>(*reinterpret_cast<const Words4*>(shared + token * plan.token_stride + c * 16), v);
            const float sum = run_sum(((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])), WIDTH);
            if (c % WIDTH != 0 || c >= chunks) continue;
            sums[c / WIDTH * 8 + token] = sum;
            found |= fabsf(sum) < INFINITY ? 0u : UNBOUNDED << token;
        }
    }
#else  // by the matrix unit: all tokens at once, several groups under way
    using Fragment = MatrixFragment<OPERAND>;
    constexpr int AT_ONCE = 4, STRIDE = THREADS / 32 * WIDTH;
    const Words4 ones[2] = {{0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u}, {0, 0, 0, 0}};
    const char* lane = shared + Fragment::column(tokens) * plan.token_stride + fragment_quarter() * 16;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * WIDTH; first < chunks; first += AT_ONCE * STRIDE) {
        Fragment part[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            part[j].zero();
            const int c = first + j * STRIDE < chunks ? first + j * STRIDE : first;
#pragma unroll
            for (int p = 0; p < WIDTH; p += 4) part[j].add(ones, lane + (c + p) * 16, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int c = first + j * STRIDE;
            part[j].gather();
            if (lane_id() >= 4 || c >= chunks) continue;
            float* into = sums + c / WIDTH * 8 + Fragment::token(0);
#pragma unroll
            for (int i = 0; i < Fragment::TOKENS; ++i) {
                into[i] = part[j].sum[i];
                found |= fabsf(part[j].sum[i]) < INFINITY ? 0u : UNBOUNDED << Fragment::token(i);
            }
        }
    }
#endif
    return found;
}
