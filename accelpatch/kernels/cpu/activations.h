// Activations made ready for the products of one stage.
//
// Float paths: a copy padded with zeros, and the sum of each block.
// Paths with dot products of bytes: x is written, in blocks of 16, 32 or 64 k, as (d0 + 256 d1 + 65536 d2 + 16777216
// d3) * 2^e with d in
// [-128, 127]: exact down to 1/64 of the block's largest |x|, and to 2^-30 of that below. Four products with the 8-bit
// weights then are exact integers, and nothing rounds but the sum over blocks: less than float32 products do,
// whose sums round at each step. A token with a NaN or an Inf has no such form, and one below 2^-80 would lose digits
// to underflow: `split` says so, and linear.h takes the dequantised path.
//
// W8A8: int8 rows with one scale each, on every path (quantize_rows.h). Dense weights and tables read x itself.
//
// Where a weight's columns have an order of their own, x is put into it first.
#pragma once
#include "layout.h"
#include "quantize_rows.h"

namespace {

constexpr int kLimbs = 4;

struct Block {
    float step;  // what one step of the uppermost limb is worth
    float sum;   // of the block's x, for formats with a minimum
    // Where the sums of products begin: minus 128 (or 8) times the sum of each limb, which is what the weights' offset
    // adds.
    int32_t start8[kLimbs], start4[kLimbs];
};

struct Activations {
    int64_t k, tokens, stride;  // stride: padded k
    int64_t width, blocks;      // of the VNNI form
    const float* given;         // the rows as they came
    int64_t given_stride;
    const float* x;  // the rows in the weight's order: `given`, or `ordered`
    int64_t x_stride;
    const int32_t* order;
    float* ordered;  // [tokens, stride], where a weight has an order
    bool raw;        // nothing but x is read
    float* padded;   // [tokens, stride]
    int8_t* limbs;   // [tokens, stride / 4, kLimbs, 4 k]
    Block* block;    // [tokens, blocks]
    uint8_t* split;  // [tokens]: has this form
    // of a W8A8 weight
    bool w8a8;
    float input_scale;  // as in ap_linear
    Quantized* rows;    // [tokens, stride]
    RowScale* scale;    // [tokens]
};

AP_INLINE int64_t block_width(const ap_linear& w) {
    return w.group == w.k || w.group % 64 == 0 ? 64 : w.group % 32 == 0 ? 32 : 16;
}

AP_INLINE bool reads_floats(const ap_linear& w) { return w.kind == AP_DENSE || w.kind == AP_TABLE; }

inline int64_t block_bytes(int64_t stride) { return round_up(stride / 16 * static_cast<int64_t>(sizeof(Block)), 64); }

// Bytes of memory that `tokens` rows of k need, whatever the block width; `ordered`: for weights with an order, too.
inline int64_t activation_bytes(int64_t tokens, int64_t k, bool ordered) {
    const int64_t stride = round_up(k, 64);
    return tokens * (stride * (ordered ? 8 : 4) + block_bytes(stride)) + round_up(tokens, 64);
}

inline Activations activations_in(void* memory, int64_t tokens, int64_t k) {
    Activations a = {};
    a.k = k;
    a.tokens = tokens;
    a.stride = round_up(k, 64);
    auto* bytes = static_cast<uint8_t*>(memory);
    a.padded = reinterpret_cast<float*>(bytes);
    a.limbs = reinterpret_cast<int8_t*>(bytes);
    a.rows = reinterpret_cast<Quantized*>(bytes);
    bytes += tokens * a.stride * 4;
    a.block = reinterpret_cast<Block*>(bytes);
    a.scale = reinterpret_cast<RowScale*>(bytes);
    bytes += tokens * block_bytes(a.stride);
    a.split = bytes;
    a.ordered = reinterpret_cast<float*>(bytes + round_up(tokens, 64));
    return a;
}

// step: what one step of the uppermost limb is worth; limb: the sum of each.
inline void finish_block(float step, const int32_t* limb, Block* block) {
    block->step = step;
    block->sum = 0;
    for (int p = 0; p < kLimbs; p++) {
        block->start8[p] = -128 * limb[p];
        block->start4[p] = -8 * limb[p];
        block->sum = block->sum * (1.0f / 256) + static_cast<float>(limb[p]);
    }
    block->sum *= block->step;
}

#if defined(__AVX512VNNI__)

// The bits of the largest |x| as an integer: they order as the numbers do, and above all stand Inf and NaN.
AP_INLINE int32_t largest_bits(const __m512* v, int64_t parts) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < parts; i++)
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(v[i]), _mm512_set1_epi32(0x7fffffff)));
    return _mm512_reduce_max_epi32(most);
}

inline bool split_block(const float* x, int64_t count, int64_t width, int8_t* limbs, Block* block) {
    const __m512i ones = _mm512_set1_epi8(1), bias = _mm512_set1_epi32(static_cast<int32_t>(0x80808080u));
    const __m512i by_limb = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const int64_t parts = width / 16;
    __m512 v[4];
    for (int64_t i = 0; i < parts; i++) {
        const int64_t left = count - 16 * i;
        const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1 << left) - 1) : 0;
        v[i] = _mm512_maskz_loadu_ps(mask, x + 16 * i);
    }
    const int32_t bits = largest_bits(v, parts);
    if (bits >= 0x7f800000) return false;
    float top;
    memcpy(&top, &bits, 4);
    int exponent = 0;
    frexpf(top, &exponent);  // top < 2^exponent
    const __m512 shift = _mm512_set1_ps(static_cast<float>(30 - exponent));
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < parts; i++) {
        __m512i n = _mm512_cvtps_epi32(_mm512_scalef_ps(v[i], shift));
        n = _mm512_xor_si512(_mm512_add_epi32(n, bias), bias);  // the bytes of n + 0x80808080, each less 128
        n = _mm512_shuffle_epi8(n, by_limb);
        _mm512_storeu_si512(limbs + 64 * i, n);
        sums = _mm512_dpbusd_epi32(sums, ones, n);
    }
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    const __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    int32_t limb[kLimbs];
    memcpy(limb, &quarter, 16);
    finish_block(top > 0 ? ldexpf(1.0f, exponent - 6) : 0.0f, limb, block);
    return true;
}

#elif defined(AP_DOTPROD)

inline bool split_block(const float* x, int64_t count, int64_t width, int8_t* limbs, Block* block) {
    float values[64] = {};
    memcpy(values, x, static_cast<size_t>(count < width ? count < 0 ? 0 : count : width) * 4);
    const int32_t bits = largest_in(values, width);
    if (bits >= 0x7f800000) return false;
    float top;
    memcpy(&top, &bits, 4);
    int exponent = 0;
    frexpf(top, &exponent);  // top < 2^exponent
    const int shift = 30 - exponent, part = shift < 127 ? shift : 127;
    const vf first = splat(ldexpf(1.0f, part)), second = splat(ldexpf(1.0f, shift - part));
    const uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t by_limb = vld1q_u8(order);
    const int32x4_t bias = vdupq_n_s32(static_cast<int32_t>(0x80808080u));
    int32x4_t sums = vdupq_n_s32(0);
    for (int64_t k = 0; k < width; k += 4) {
        int32x4_t n = vcvtnq_s32_f32(load(values + k) * first * second);
        n = veorq_s32(vaddq_s32(n, bias), bias);  // the bytes of n + 0x80808080, each less 128
        const int8x16_t bytes = vreinterpretq_s8_u8(vqtbl1q_u8(vreinterpretq_u8_s32(n), by_limb));
        vst1q_s8(limbs + 4 * k, bytes);
        sums = vdotq_s32(sums, bytes, vdupq_n_s8(1));
    }
    int32_t limb[kLimbs];
    vst1q_s32(limb, sums);
    finish_block(top > 0 ? ldexpf(1.0f, exponent - 6) : 0.0f, limb, block);
    return true;
}

#endif

// Makes tokens [first, last) ready. Padding up to the stride is zeros.
inline void prepare(Activations& a, int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
        if (a.order) {
            const float* from = a.given + m * a.given_stride;
            for (int64_t k = 0; k < a.k; k++) a.ordered[m * a.stride + k] = from[a.order[k]];
        }
        a.split[m] = 1;
        if (a.raw) continue;
        const float* x = a.x + m * a.x_stride;
        if (a.w8a8) {
            a.scale[m] = quantize_row(x, a.k, a.stride, a.input_scale, a.rows + m * a.stride);
            continue;
        }
#if defined(AP_BYTES)
        float largest = 0;
        for (int64_t b = 0; b < a.blocks; b++) {
            const int64_t k = b * a.width;
            if (!split_block(x + k, a.k - k, a.width, a.limbs + m * a.stride * 4 + k * 4, a.block + m * a.blocks + b))
                a.split[m] = 0;
            largest = fmaxf(largest, a.block[m * a.blocks + b].step);
        }
        if (largest < 0x1p-86f && largest > 0) a.split[m] = 0;
#else
        float* out = a.padded + m * a.stride;
        memcpy(out, x, static_cast<size_t>(a.k) * 4);
        memset(out + a.k, 0, static_cast<size_t>(a.stride - a.k) * 4);
        for (int64_t b = 0; b < a.blocks; b++) {
            vf total = {};
            for (int64_t k = 0; k < a.width; k += kLanes) total += load(out + b * a.width + k);
            a.block[m * a.blocks + b].sum = sum(total);
            if (!std::isfinite(a.block[m * a.blocks + b].sum))
                a.split[m] = 0;  // Inf - Inf must not come of scale and minimum apart
        }
#endif
    }
}

// The form that the products with `w` read.
inline void describe(Activations& a, const float* x, int64_t x_stride, const ap_linear& w) {
    a.given = x;
    a.given_stride = x_stride;
    a.order = w.order;
    a.x = w.order ? a.ordered : x;
    a.x_stride = w.order ? a.stride : x_stride;
    a.raw = reads_floats(w);
    a.width = block_width(w);
    a.blocks = (a.k + a.width - 1) / a.width;
    a.w8a8 = w.kind == AP_W8A8;
    a.input_scale = a.w8a8 ? w.input_scale : 0.0f;
}

// Whether the products with `w` read the form that `a` has.
inline bool made_for(const Activations& a, const ap_linear& w) {
    if (a.order != w.order) return false;
    if (reads_floats(w)) return true;
    if (w.kind == AP_W8A8) return a.w8a8 && a.input_scale == w.input_scale;
    return !a.raw && !a.w8a8 && a.width == block_width(w);
}

}  // namespace
