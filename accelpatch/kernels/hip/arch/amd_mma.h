// Matrix products, as in nvidia_mma.h, which says what the names are. Part of amd.h.
#pragma once

constexpr int BLOCKS_LAUNCHED = 1;
constexpr int K_TILE_VALUES = 2048;  // of K, staged at once where not all fits
constexpr int DEEP = 1, SHALLOW = 1, DEEP_FLOATS = 1, DEEP_COMPACT = 1;
constexpr int NARROW_TOKENS = 0;
constexpr int WIDE_TOKENS = 8;
#if defined(__gfx90a__)
constexpr bool FLUSHING_HALF = true;  // fp16 matrix instructions flush subnormals to zero
#else
constexpr bool FLUSHING_HALF = false;
#endif
constexpr bool HALF_WEIGHTS = false;

constexpr int ROWS_PER_LANE = 1;
DEVICE int fragment_row(int) { return lane_id() & 15; }
DEVICE int fragment_quarter() { return lane_id() >> 4; }
constexpr int SCALE_PAIRS = 4;
DEVICE int scale_pair() { return 4 * ((lane_id() >> 4) & 1); }

template <bool> struct Cells {
    static constexpr int COUNT = 4, TOKENS = 1;
    static DEVICE int row(int i) { return 4 * (lane_id() >> 4) + i; }
    static DEVICE int token(int) { return lane_id() & 7; }
    static DEVICE bool owns(int) { return (lane_id() & 15) < 8; }
    static DEVICE int pair(int i) { return i; }
    static DEVICE int half(int) { return lane_id() >> 5; }
};

template <class T> struct MatrixMma : Cells<false> {
    float sum[4];
    DEVICE void zero() {
        for (float& v : sum) v = 0.f;
    }
    DEVICE void finish() {}
    static DEVICE int column(int tokens) { return min(lane_id() & 7, tokens - 1); }
    DEVICE void add(const Words4* a, const char* chunk, int, int) {
        const Words4 b = *reinterpret_cast<const Words4*>(chunk);
        multiply_halves<T>(sum, a[0].x, a[0].y, b.x, b.y);
        multiply_halves<T>(sum, a[0].z, a[0].w, b.z, b.w);
    }
};

// fp16 by multiply-add of mixed precision, for gfx90a, whose matrix unit flushes fp16 subnormals to zero. A lane sums a
// quarter of a row's products with each token; finish() adds the quarters.
struct MixedMma {
    static constexpr int COUNT = 8, TOKENS = 8;
    float sum[8];
    static DEVICE int row(int) { return lane_id() & 15; }
    static DEVICE int token(int i) { return i; }
    static DEVICE bool owns(int) { return lane_id() < 16; }
    DEVICE void zero() {
        for (float& v : sum) v = 0.f;
    }
    DEVICE void finish() {
        for (float& v : sum) v += lane_xor(v, 16), v += lane_xor(v, 32);
    }
    static DEVICE int column(int) { return 0; }
    DEVICE void add(const Words4* a, const char* chunk, int stride, int tokens) {
        const uint32_t w[4] = {a[0].x, a[0].y, a[0].z, a[0].w};
#pragma unroll
        for (int token = 0; token < 8; ++token) {
            if (token >= tokens) continue;
            const Words4 b = *reinterpret_cast<const Words4*>(chunk + token * stride);
            const uint32_t x[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[token] = __builtin_fmaf(half_to_float(w[i] & 0xffffu), half_to_float(x[i] & 0xffffu), sum[token]);
                sum[token] = __builtin_fmaf(half_to_float(w[i] >> 16), half_to_float(x[i] >> 16), sum[token]);
            }
        }
    }
};
template <class T, bool MIXED> struct FloatMmaOf {
    using Type = MatrixMma<T>;
};
template <class T> struct FloatMmaOf<T, true> {
    using Type = MixedMma;
};
template <class T> using FloatMma = typename FloatMmaOf<T, FLUSHING_HALF && !T::BF16>::Type;

template <bool> struct IntegerMma : Cells<false> {
    int high[4], low[4];
    struct Activations {
        Words4 high, low;
    };
    DEVICE void zero() {
        for (int i = 0; i < 4; ++i) high[i] = low[i] = 0;
    }
    DEVICE void plus(const IntegerMma& other) {
        for (int i = 0; i < 4; ++i) high[i] += other.high[i], low[i] += other.low[i];
    }
    static DEVICE int activations_at(int tokens, int token_stride) {
        return min(lane_id() & 7, tokens - 1) * token_stride + fragment_quarter() * 32;
    }
    static DEVICE Activations load(const char* x) {
        return {*reinterpret_cast<const Words4*>(x), *reinterpret_cast<const Words4*>(x + 16)};
    }
    DEVICE void add(const Words4* a, const Activations& x, int part) {
        const uint32_t a0 = part ? a[0].z : a[0].x, a1 = part ? a[0].w : a[0].y;
        multiply_bytes(high, a0, a1, part ? x.high.z : x.high.x, part ? x.high.w : x.high.y);
        multiply_bytes(low, a0, a1, part ? x.low.z : x.low.x, part ? x.low.w : x.low.y);
    }
    DEVICE float value(int i) const { return float(high[i] * 256 + low[i]); }
    // The value of a codebook's products p (codebook.h): of one limb, or of two limbs, divided by 256.
    static DEVICE float value_of_book(const IntegerMma (&p)[1], int i) { return p[0].value(i); }
    static DEVICE float value_of_book(const IntegerMma (&p)[2], int i) {
        return float(p[0].high[i] * 256 + p[0].low[i] + p[1].high[i] + (p[1].low[i] >> 8));
    }
};

// 8-bit floats E converted to fp16, where the matrix unit does not have their form. None of them is a subnormal of
// fp16.
template <class E> DEVICE void multiply_as_halves(float* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    const uint32_t a[2] = {a0, a1}, b[2] = {b0, b1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t w[2], x[2];
        E::halves(a[i], w[0], w[1]), E::halves(b[i], x[0], x[1]);
        multiply_halves<typename E::Half>(sum, w[0], w[1], x[0], x[1]);
    }
}
template <class F> struct ByteMma : Cells<false> {
    typename F::Sum sum[4], other[4];
    DEVICE void zero() {
        for (int i = 0; i < 4; ++i) sum[i] = other[i] = 0;
    }
    DEVICE void finish() {
        for (int i = 0; i < 4; ++i) sum[i] += other[i];
    }
    static DEVICE int activations_at(int tokens, int token_stride) {
        return min(lane_id() & 7, tokens - 1) * token_stride + fragment_quarter() * 16;
    }
    static DEVICE void multiply(typename F::Sum* sums, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
        if constexpr (std::is_integral_v<typename F::Sum>) multiply_bytes(sums, a0, a1, b0, b1);
        else if constexpr (E4M3_HERE<F::Float::FNUZ>) multiply_e4m3(sums, a0, a1, b0, b1);
        else multiply_as_halves<typename F::Float>(sums, a0, a1, b0, b1);
    }
    DEVICE void add(const Words4 (&w)[ROWS_PER_LANE], const Words4& x) {
        multiply(sum, w[0].x, w[0].y, x.x, x.y);
        multiply(other, w[0].z, w[0].w, x.z, x.w);
    }
};

constexpr int MATRIX_TOKENS = 16, MOST_TOKENS = 16;
DEVICE int matrix_column() { return lane_id() & 15; }
constexpr int MATRIX_ROWS = 4;
constexpr DEVICE int matrix_row_index(int i) { return i; }
DEVICE int matrix_row(int index) { return 4 * (lane_id() >> 4) + index; }
DEVICE int matrix_token(int) { return lane_id() & 15; }
DEVICE float matrix_below(const float* sums, int i) { return lane_xor(sums[i], 32); }
template <class T> DEVICE void multiply_eight(float* c, const uint32_t (&w)[ROWS_PER_LANE][4], const Words4& x) {
    multiply_halves<T>(c, w[0][0], w[0][1], x.x, x.y);
    multiply_halves<T>(c, w[0][2], w[0][3], x.z, x.w);
}
