// Matrix products of 16 rows of weights with up to 8 tokens, and how their kernels are cut. Part of nvidia.h.
#pragma once

// On each SM, also where there are fewer tiles: the successor's blocks then find one place on each.
constexpr int BLOCKS_LAUNCHED = 1;
constexpr int K_TILE_VALUES = 4096;   // of K staged at once where not all fits: 8 tokens within half an SM
constexpr int DEEP = 4, SHALLOW = 2;  // stages of a multi-stage buffer
constexpr int DEEP_FLOATS = 5;        // of 16-bit weights, whose stages are soon done
constexpr int DEEP_COMPACT = 3;       // of 12 bits, whose stages are half as large again
// Up to how many tokens integer products have a form of their own: a warp finishes 16 rows of two.
constexpr int NARROW_TOKENS = 2;
constexpr int WIDE_TOKENS = 3;         // up to how many tokens float products run without clusters
constexpr bool FLUSHING_HALF = false;  // whether fp16 matrix products lose subnormals
constexpr bool HALF_WEIGHTS = true;    // whether weights of fp8 and NVFP4 are multiplied as fp16, see halves.h

// ---- matrix products: a lane holds 16 bytes of each of ROWS_PER_LANE rows of a tile of 16; K is permuted alike in
// both operands, so the instruction's own order of K never matters ----
constexpr int ROWS_PER_LANE = 2;
DEVICE int fragment_row(int i) { return (lane_id() >> 2) + 8 * i; }
DEVICE int fragment_quarter() { return lane_id() & 3; }  // which 16 bytes of a row's 64
// Rows r and r + 8 share a word of scales: where a lane's words begin, and how many row pairs follow each other.
constexpr int SCALE_PAIRS = 1;
DEVICE int scale_pair() { return lane_id() >> 2; }

// Which row and token each of a lane's sums belongs to. NARROW: up to 4 tokens, else 8.
template <bool NARROW> struct Cells {
    static constexpr int COUNT = NARROW ? 2 : 4, TOKENS = NARROW ? 1 : 2;  // TOKENS: different ones, neighbours
    static DEVICE int row(int i) { return (lane_id() >> 2) + 8 * (NARROW ? i : i >> 1); }
    static DEVICE int token(int i) { return NARROW ? lane_id() & 3 : 2 * (lane_id() & 3) + (i & 1); }
    static DEVICE bool owns(int) { return true; }
    static DEVICE int pair(int) { return 0; }
    static DEVICE int half(int i) { return NARROW ? i : i >> 1; }  // of the word of scales
};

// 16-bit floats: 8 tokens.
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

// Signed bytes of weights times 16-bit integers (a high byte and a low one, 16 bytes apart): exact. Narrow: a token's
// two bytes are two columns of one product; else each byte has a product of its own, and the low one no sign.
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
    // Where this lane's activations begin, from those of token 0.
    static DEVICE int place(int tokens, int token_stride) {
        const int column = lane_id() >> 2, token = min(NARROW ? column >> 1 : column, tokens - 1);
        return token * token_stride + (NARROW ? column & 1 : 0) * 16 + fragment_quarter() * 32;
    }
    static DEVICE Activations load(const char* x) {
        Activations all;
#pragma unroll
        for (int i = 0; i < MMAS; ++i) all.b[i] = *reinterpret_cast<const Words4*>(x + i * 16);
        return all;
    }
    // The first 8 bytes of each 16, or the last.
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
    // Of a codebook (codebook.h): of one limb, or a 256th of two.
    static DEVICE float value_of_book(const IntegerMma (&p)[2], int i) {
        return float((p[0].high(i) - p[1].high(i)) * 256 + p[0].low(i) - p[1].low(i));
    }
    static DEVICE float value_of_book(const IntegerMma (&p)[4], int i) {
        const int highs = (p[0].high(i) - p[1].high(i)) * 128 + p[2].high(i) - p[3].high(i),
                  lows = (p[0].low(i) - p[1].low(i)) * 128 + p[2].low(i) - p[3].low(i);
        return float(highs + (lows >> 8));
    }
};

// 16 rows by 32 of K, 8-bit floats E, times 32 by 8 columns: as fp16, whose products are exact and whose sums are those
// of floats. On Hopper mma's own e4m3 is compiled to just that; where it is an instruction (QMMA), its sums may have
// fewer bits.
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
// Bytes of weights times those of 8 tokens, 16 of a lane's row with 16 of a token.
template <class F> struct ByteMma : Cells<false> {
    typename F::Sum sum[4], other[4];  // two chains
    DEVICE void zero() {
        for (int i = 0; i < 4; ++i) sum[i] = other[i] = 0;
    }
    DEVICE void finish() {
        for (int i = 0; i < 4; ++i) sum[i] += other[i];
    }
    static DEVICE int place(int tokens, int token_stride) {
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

// 16-bit floats for many tokens, MATRIX_TOKENS at a time: the token whose values a lane gives, the cells of its sums,
// and eight values of K of each of its rows, as pairs, times eight of a token.
constexpr int MATRIX_TOKENS = 8, MOST_TOKENS = 32;  // MOST: of a block
DEVICE int matrix_column() { return lane_id() >> 2; }
constexpr int MATRIX_ROWS = 2;  // different ones of a lane's sums
constexpr DEVICE int matrix_which(int i) { return i >> 1; }
DEVICE int matrix_row(int which) { return (lane_id() >> 2) + 8 * which; }
DEVICE int matrix_token(int i) { return 2 * (lane_id() & 3) + (i & 1); }
DEVICE float matrix_below(const float* sums, int i) { return sums[i | 2]; }  // of row r < 8: what row r + 8 has
template <class T> DEVICE void multiply_eight(float* c, const uint32_t (&w)[ROWS_PER_LANE][4], const Words4& x) {
    multiply_halves<T>(c, w[0][0], w[1][0], w[0][1], w[1][1], x.x, x.y);
    multiply_halves<T>(c, w[0][2], w[1][2], w[0][3], w[1][3], x.z, x.w);
}
