// Sixteen rows of integer weights times M tokens by Arm's dot products of bytes: one for each limb of x
// (activations.h), as dot_vnni.h does it. A vector holds 4 rows of 4 k, and a load of x the four limbs of these k.
#pragma once
#include "activations.h"
#include "scales.h"

#if defined(AP_DOTPROD)
namespace {

constexpr int64_t kBytesAhead = 4096;  // how far ahead of the loads memory is asked for; not measured

template <int M, int R> struct LimbSums {
    int32x4_t limb[R][M][kLimbs];
};

// Codes less 128 need no more; what others are less is in the sums from the start.
template <int M, int R, int KIND> AP_INLINE void begin(LimbSums<M, R>& s, const Block* block, int64_t stride) {
    for (int m = 0; m < M; m++)
        for (int p = 0; p < kLimbs; p++)
            for (int r = 0; r < R; r++)
                s.limb[r][m][p] = vdupq_n_s32(KIND == AP_INT8 ? 0 : block[m * stride].start4[p] / 8 * kCentre<KIND>);
}

// weights: R vectors of 4 rows. x: the limbs of their 4 k, for each token `stride` bytes on.
template <int M, int R>
AP_INLINE void multiply(LimbSums<M, R>& s, const int8x16_t* weights, const int8_t* x, int64_t stride) {
    for (int m = 0; m < M; m++) {
        const int8x16_t limbs = vld1q_s8(x + m * stride);
        for (int r = 0; r < R; r++) {
            int32x4_t* sum = s.limb[r][m];
            sum[0] = vdotq_laneq_s32(sum[0], weights[r], limbs, 0);
            sum[1] = vdotq_laneq_s32(sum[1], weights[r], limbs, 1);
            sum[2] = vdotq_laneq_s32(sum[2], weights[r], limbs, 2);
            sum[3] = vdotq_laneq_s32(sum[3], weights[r], limbs, 3);
        }
    }
}

// Of AP_INT3: 8 vectors of 4 k for each 32 k.
template <int M, int R>
AP_INLINE void multiply_three(LimbSums<M, R>& s, const uint8_t* w, const int8_t* x, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k += 32, w += 192, x += 128) {
        __builtin_prefetch(w + kBytesAhead);
        for (int v = 0; v < 8; v++) {
            int8x16_t codes[R];
            for (int r = 0; r < R; r++) {
                const uint8x16_t two = vshlq_u8(vld1q_u8(w + v / 4 * 64 + 16 * r), vdupq_n_s8(int8_t(-(v % 4 * 2))));
                const uint8x16_t bit = vshlq_u8(vld1q_u8(w + 128 + 16 * r), vdupq_n_s8(int8_t(2 - v)));
                codes[r] = vreinterpretq_s8_u8(vorrq_u8(vandq_u8(two, vdupq_n_u8(3)), vandq_u8(bit, vdupq_n_u8(4))));
            }
            multiply<M, R>(s, codes, x + v * 16, stride);
        }
    }
}

// `count` k of R vectors of rows, whose codes begin at w.
template <int M, int R, int KIND>
AP_INLINE void multiply_block(LimbSums<M, R>& s, const uint8_t* w, const int8_t* x, int64_t stride, int64_t count) {
    const uint8x16_t low = vdupq_n_u8(15);
    int8x16_t first[R], second[R];
    if (KIND == AP_INT8) {
        for (int64_t k = 0; k < count; k += 4) {
            __builtin_prefetch(w + kBytesAhead + k * 16);
            for (int r = 0; r < R; r++) first[r] = as_signed(vld1q_u8(w + k * 16 + 16 * r));
            multiply<M, R>(s, first, x + k * 4, stride);
        }
        return;
    }
    if (KIND == AP_INT3) return multiply_three<M, R>(s, w, x, stride, count);
    for (int64_t k = 0; k < count; k += 8) {
        __builtin_prefetch(w + kBytesAhead + k * 8);
        for (int r = 0; r < R; r++) {
            const uint8_t* p = w + k * 8 + 16 * r;
            const uint8x16_t both = vld1q_u8(p);
            uint8x16_t one = vandq_u8(both, low), other = vshrq_n_u8(both, 4);
            if (KIND == AP_Q6_K) {  // a group of 16: k is 0 or 8
                uint8x16_t upper = vld1q_u8(p + 128 - k * 8);
                upper = k ? vshrq_n_u8(upper, 4) : upper;
                one = vorrq_u8(one, vshlq_n_u8(vandq_u8(upper, vdupq_n_u8(3)), 4));
                other = vorrq_u8(other, vshlq_n_u8(vandq_u8(upper, vdupq_n_u8(12)), 2));
            }
            first[r] = vreinterpretq_s8_u8(one), second[r] = vreinterpretq_s8_u8(other);
        }
        multiply<M, R>(s, first, x + k * 4, stride);
        multiply<M, R>(s, second, x + k * 4 + 16, stride);
    }
}

// sum of q * x of a block, in units of its uppermost limb
AP_INLINE vf join(const int32x4_t limb[kLimbs]) {
    vf total = {};
    for (int p = 0; p < kLimbs; p++) total = fma(total, splat(1.0f / 256), vcvtq_f32_s32(limb[p]));
    return total;
}

// total += value, with what the addition lost kept apart (Knuth's two-sum).
AP_INLINE void add(vf& total, vf& lost, vf value) {
    const vf sum = total + value, part = sum - total;
    lost += (total - (sum - part)) + (value - part);
    total = sum;
}

// y[m][row] of one block of rows for M tokens from `token` on. MIDDLE: w is more than (u - centre) * scale.
template <int M, int KIND, bool MIDDLE = KIND == AP_Q4_K>
void dot_limbs(
    const ap_linear& w, const Layout& l, const uint8_t* header, const Activations& a, int64_t token, float (*y)[16]) {
    constexpr int R = 4 / M;  // 16 sums
    const int64_t stride = a.stride * 4;
    for (int64_t v = 0; v < kBlockVectors; v += R) {
        const int8_t* x = a.limbs + token * stride;
        const Block* block = a.block + token * a.blocks;
        vf total[R][M] = {}, lost[R][M] = {};
        for (int64_t g = 0; g < l.groups; g++) {
            const Place p = place_of(l, header, g);
            vf scale[R], middle[R] = {};
            for (int r = 0; r < R; r++) {
                scale[r] = group_scale<KIND>(w, p.header, p.at, v + r);
                if (MIDDLE) middle[r] = group_middle<KIND>(w, p.header, p.at, v + r, scale[r]);
            }
            for (int64_t k = 0; k < l.group; k += a.width, x += a.width * 4, block++) {
                const int64_t count = l.group - k < a.width ? l.group - k : a.width;
                LimbSums<M, R> sums;
                begin<M, R, KIND>(sums, block, a.blocks);
                const uint8_t* codes = p.codes + k * kRowsBytes<KIND> + v * 16;
                multiply_block<M, R, KIND>(sums, codes, x, stride, count);
                for (int m = 0; m < M; m++) {
                    const Block& b = block[m * a.blocks];
                    for (int r = 0; r < R; r++) {
                        vf value = join(sums.limb[r][m]) * (scale[r] * b.step);
                        if (MIDDLE) value = fma(middle[r], splat(b.sum), value);
                        add(total[r][m], lost[r][m], value);
                    }
                }
            }
        }
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) store(y[m] + (v + r) * kLanes, total[r][m] + lost[r][m]);
    }
}

}  // namespace
#endif
