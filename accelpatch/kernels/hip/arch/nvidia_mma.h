// Matrix products of 16 rows of weights with up to 8 tokens, and constants of their kernels. Part of nvidia.h.
#pragma once

// Blocks on each SM, also where there are fewer tiles than SMs: each SM then has room for one block of the next kernel.
constexpr int BLOCKS_LAUNCHED = 1;
constexpr int K_TILE_VALUES = 4096;   // of K staged at once where not all fits: 8 tokens within half an SM
constexpr int DEEP = 4, SHALLOW = 2;  // stages of a multi-stage buffer
constexpr int DEEP_FLOATS = 5;        // of 16-bit weights, whose stages take less time
constexpr int DEEP_COMPACT = 3;       // of 12 bits, whose stages are half as large again
// Up to this many tokens integer formats have a NARROW kernel, in which one warp finishes 16 rows of both tokens.
constexpr int NARROW_TOKENS = 2;
constexpr int WIDE_TOKENS = 3;         // up to this many tokens float formats run without clusters
constexpr bool FLUSHING_HALF = false;  // whether fp16 matrix instructions flush subnormals to zero
constexpr bool HALF_WEIGHTS = true;    // whether fp8 and NVFP4 weights are multiplied as fp16, see halves.h

// ---- operands of weights: a lane has 16 bytes of each of ROWS_PER_LANE rows of a tile of 16. K is permuted in the
// same way in both operands, so that the instruction's order of K does not matter ----
constexpr int ROWS_PER_LANE = 2;
DEVICE int fragment_row(int i) { return (lane_id() >> 2) + 8 * i; }
DEVICE int fragment_quarter() { return lane_id() & 3; }  // which 16 bytes of a row's 64
// Rows r and r + 8 are a pair, and share a word of 16-bit scales. SCALE_PAIRS: pairs whose scales a lane needs, from
// pair scale_pair() on.
constexpr int SCALE_PAIRS = 1;
DEVICE int scale_pair() { return lane_id() >> 2; }

// The layout of a lane's sums, COUNT of them: sum i belongs to row(i) of the tile and to token(i). Its scale is in half
// half(i) of the word of row pair pair(i). owns(i): this lane stores the sum. TOKENS: different tokens of a lane's
// sums, which are neighbours. NARROW: for up to 4 tokens, else 8.
template <bool NARROW> struct Cells {
    static constexpr int COUNT = NARROW ? 2 : 4, TOKENS = NARROW ? 1 : 2;
    static DEVICE int row(int i) { return (lane_id() >> 2) + 8 * (NARROW ? i : i >> 1); }
    static DEVICE int token(int i) { return NARROW ? lane_id() & 3 : 2 * (lane_id() & 3) + (i & 1); }
    static DEVICE bool owns(int) { return true; }
    static DEVICE int pair(int) { return 0; }
    static DEVICE int half(int i) { return NARROW ? i : i >> 1; }
};

// 16-bit floats, for 8 tokens.
template <class T> struct FloatMma : Cells<false> {
    float sum[4], other[4];  // two chains: one alone would wait for its own latency
    DEVICE void zero() {
        for (int i = 0; i < 4; ++i) sum[i] = other[i] = 0.f;
    }
    DEVICE void finish() {
        for (int i = 0; i < 4; ++i) sum[i] += other[i];
    }
    // The token whose activations this lane reads; columns past the last token repeat it and are never stored.
    static DEVICE int column(int tokens) { return min(lane_id() >> 2, tokens - 1); }
    DEVICE void add(const Words4* a, const char* chunk, int, int) {
        const Words4 b = *reinterpret_cast<const Words4*>(chunk);
        multiply_halves<T>(sum, a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
        multiply_halves<T>(other, a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
    }
};

// Signed bytes of weights times activations in two limbs of a byte (limbs.h), 16 bytes apart: exact. NARROW: the limbs
// of a token are two columns of one matrix product. Otherwise each limb has a product of its own, and low limbs are
// unsigned.
template <bool NARROW> struct IntegerMma : Cells<NARROW> {
    static constexpr int MMAS = NARROW ? 1 : 2;
    int sum[MMAS][4];
    struct Activations {
        Words4 b[MMAS];
    };
    DEVICE void zero() {
        for (auto& one : sum)
            for (int& v : one) v = 0;
    }
    DEVICE void plus(const IntegerMma& other) {
        for (int i = 0; i < MMAS; ++i)
            for (int j = 0; j < 4; ++j) sum[i][j] += other.sum[i][j];
    }
    // The byte offset of this lane's activations from those of token 0.
    static DEVICE int activations_at(int tokens, int token_stride) {
        const int column = lane_id() >> 2, token = min(NARROW ? column >> 1 : column, tokens - 1);
        return token * token_stride + (NARROW ? column & 1 : 0) * 16 + fragment_quarter() * 32;
    }
    static DEVICE Activations load(const char* x) {
        Activations all;
#pragma unroll
        for (int i = 0; i < MMAS; ++i) all.b[i] = *reinterpret_cast<const Words4*>(x + i * 16);
        return all;
    }
    // Multiplies the first 8 bytes of each 16 (part 0), or the last (part 1).
    DEVICE void add(const Words4* a, const Activations& x, int part) {
#pragma unroll
        for (int i = 0; i < MMAS; ++i) {
            if (part == 0) multiply_bytes(sum[i], a[0].x, a[1].x, a[0].y, a[1].y, x.b[i].x, x.b[i].y, i == 0);
            else multiply_bytes(sum[i], a[0].z, a[1].z, a[0].w, a[1].w, x.b[i].z, x.b[i].w, i == 0);
        }
    }
    DEVICE int high(int i) const { return NARROW ? sum[0][2 * i] : sum[0][i]; }
    DEVICE int low(int i) const { return NARROW ? sum[0][2 * i + 1] : sum[MMAS - 1][i]; }
    DEVICE float value(int i) const { return float(high(i) * 256 + low(i)); }
    // The value of a codebook's products p (codebook.h), which here has two halves: of one limb, or of two limbs,
    // divided by 256.
    static DEVICE float value_of_book(const IntegerMma (&p)[2], int i) {
        return float((p[0].high(i) - p[1].high(i)) * 256 + p[0].low(i) - p[1].low(i));
    }
    static DEVICE float value_of_book(const IntegerMma (&p)[4], int i) {
        const int highs = (p[0].high(i) - p[1].high(i)) * 128 + p[2].high(i) - p[3].high(i),
                  lows = (p[0].low(i) - p[1].low(i)) * 128 + p[2].low(i) - p[3].low(i);
        return float(highs + (lows >> 8));
    }
};

// 16 rows by 32 of K, 8-bit floats E, times 32 by 8 columns. They are converted to fp16, whose products are exact and
// are summed in float32. On Hopper mma of e4m3 is compiled to the same; where it is an instruction (QMMA), its sums may
// have fewer bits.
template <class E>
DEVICE void multiply_e4m3(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const uint32_t bytes[6] = {a0, a1, a2, a3, b0, b1};
    uint32_t v[2][6];
#pragma unroll
    for (int i = 0; i < 6; ++i) E::halves(bytes[i], v[0][i], v[1][i]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        multiply_halves<typename E::Half>(c, v[h][0], v[h][1], v[h][2], v[h][3], v[h][4], v[h][5]);
}
// Bytes of weights times bytes of activations, of 8 tokens: 16 of a lane's row with 16 of a token.
template <class F> struct ByteMma : Cells<false> {
    typename F::Sum sum[4], other[4];  // two chains, as above
    DEVICE void zero() {
        for (int i = 0; i < 4; ++i) sum[i] = other[i] = 0;
    }
    DEVICE void finish() {
        for (int i = 0; i < 4; ++i) sum[i] += other[i];
    }
    static DEVICE int activations_at(int tokens, int token_stride) {
        return min(lane_id() >> 2, tokens - 1) * token_stride + fragment_quarter() * 16;
    }
    static DEVICE void multiply(
        typename F::Sum* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
        if constexpr (std::is_integral_v<typename F::Sum>) multiply_bytes(c, a0, a1, a2, a3, b0, b1, true);
        else multiply_e4m3<typename F::Float>(c, a0, a1, a2, a3, b0, b1);
    }
    DEVICE void add(const Words4 (&w)[ROWS_PER_LANE], const Words4& x) {
        multiply(sum, w[0].x, w[1].x, w[0].y, w[1].y, x.x, x.y);
        multiply(other, w[0].z, w[1].z, w[0].w, w[1].w, x.z, x.w);
    }
};

// 16-bit floats for many tokens (int4_gemm.h), MATRIX_TOKENS a product, up to MOST_TOKENS a block. matrix_column: the
// token whose activations a lane passes. A lane has four sums, of MATRIX_ROWS rows: sum i belongs to
// matrix_row(matrix_row_index(i)) and to matrix_token(i). matrix_below: for a sum of row r < 8 that of row r + 8.
// multiply_eight multiplies eight values of K of each of a lane's rows with eight of a token.
constexpr int MATRIX_TOKENS = 8, MOST_TOKENS = 32;
DEVICE int matrix_column() { return lane_id() >> 2; }
constexpr int MATRIX_ROWS = 2;
constexpr DEVICE int matrix_row_index(int i) { return i >> 1; }
DEVICE int matrix_row(int index) { return (lane_id() >> 2) + 8 * index; }
DEVICE int matrix_token(int i) { return 2 * (lane_id() & 3) + (i & 1); }
DEVICE float matrix_below(const float* sums, int i) { return sums[i | 2]; }
template <class T> DEVICE void multiply_eight(float* c, const uint32_t (&w)[ROWS_PER_LANE][4], const Words4& x) {
    multiply_halves<T>(c, w[0][0], w[1][0], w[0][1], w[1][1], x.x, x.y);
    multiply_halves<T>(c, w[0][2], w[1][2], w[0][3], w[1][3], x.z, x.w);
}
