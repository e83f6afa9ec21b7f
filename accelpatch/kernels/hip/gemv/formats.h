// Weight formats: how the 16 bytes that a lane holds of one row and one step become operands of the matrix unit.
//
// A step is KSTEP values of K: PARTS products of 32. Float formats multiply 16-bit floats; activations lie in shared
// memory in chunks of 8 (stage.h), and chunk(p, quarter) says which chunk of a step the words of part p belong to.
// Others quantise activations on their way, which lie in slots of 16 then: integer formats multiply signed bytes by
// 16-bit integers (limbs.h), and W8A8 bytes by bytes (quantized_stage.h).
#pragma once
#include <type_traits>

#include "codebook.h"
#include "e4m3.h"
#include "gemv.h"
#include "arch/portability.h"

// fp16 or bf16 weights, row-major.
struct Plain {
    static constexpr bool QUANTIZES = false, TILED = false, SPLIT = false;
    static constexpr int KSTEP = 32, PARTS = 1, GROUPS = 0, OFFSET = OFFSET_NONE, STEP_BYTES = 64, VALUE_BITS = 16,
                         TOKEN_PAD = 64;
    static DEVICE int chunk(int p, int quarter) { return 4 * p + quarter; }
    template <class T> static DEVICE Words4 expand(const Words4& raw, int) { return raw; }
};

// fp8 e4m3 weights, row-major, one scale a row.
template <bool FNUZ> struct Fp8 {
    static constexpr bool QUANTIZES = false, TILED = false, SPLIT = false;
    static constexpr int KSTEP = 64, PARTS = 2, GROUPS = 0, OFFSET = OFFSET_NONE, STEP_BYTES = 64, VALUE_BITS = 8,
                         TOKEN_PAD = 16;
    static DEVICE int chunk(int p, int quarter) { return 2 * quarter + p; }
    template <class T, uint32_t BYTES> static DEVICE uint32_t pair(uint32_t w) {
        const uint32_t half = E4m3<FNUZ>::template pair<BYTES>(w);
        return T::BF16 ? Bf16::down_pair(F16::up(half & 0xffffu), F16::up_high(half)) : half;
    }
    template <class T> static DEVICE Words4 expand(const Words4& raw, int p) {
        const uint32_t a = word_of(raw, 2 * p), b = word_of(raw, 2 * p + 1);
        return {pair<T, 0x4140>(a), pair<T, 0x4342>(a), pair<T, 0x4140>(b), pair<T, 0x4342>(b)};
    }
    // Where weights are multiplied as fp16: those of part p of a lane's rows.
    template <class SLOT> static DEVICE void halves(const SLOT& slot, int p, Words4 (&w)[ROWS_PER_LANE]) {
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            E4m3<FNUZ>::halves(word_of(slot.w[h], 2 * p), w[h].x, w[h].y);
            E4m3<FNUZ>::halves(word_of(slot.w[h], 2 * p + 1), w[h].z, w[h].w);
        }
    }
};

// The same with a float scale for each row and 128 values of K, the two steps of a stage.
struct Fp8Blocks : Fp8<false> {};
template <class F> constexpr bool STAGE_SCALES = std::is_same_v<F, Fp8Blocks>;

// bf16 weights without loss, in tiles of 16 rows by 64 values: a sign and a mantissa in 8 bits, and in 4 the exponent
// less that of the row's window, which its scale makes up for. A value outside of the window has
// the smallest code here, and is kept as an outlier in a table of its own.
//
// Of 1,536 bytes, 16 for (row r, quarter t) at (4 r + t) * 16 are bytes: word j holds values 16 t + 4 j + 0 to 3, the
// first two as they lie in a pair of bf16, the others with the bytes of each half exchanged. 16 for (r, t) and (r + 8,
// t) at 1024 + (4 r + t) * 16 are exponents, two words a row: word p holds those of values 16 t + 8 p + 0 to 7, a
// pair's where shifts by 0, 4, -4 and a rotation by 8 bring them into place.
struct Compact {
    static constexpr bool QUANTIZES = false, TILED = true, SPLIT = false;
    static constexpr int KSTEP = 64, PARTS = 2, GROUPS = 0, OFFSET = OFFSET_NONE, STEP_BYTES = 1536, VALUE_BITS = 12,
                         TOKEN_PAD = 16;
    static constexpr uint32_t LEAST = 0x3800;  // the smallest code, as bf16
    static DEVICE int chunk(int p, int quarter) { return 2 * quarter + p; }
    static DEVICE uint32_t pair(uint32_t bytes, uint32_t exponents) {
        return (bytes & 0x807f807fu) | LEAST * 0x10001u | (exponents & 0x07800780u);
    }
    static DEVICE Words4 expand(const Words4& raw, uint32_t exponents, int p) {
        const uint32_t a = word_of(raw, 2 * p), b = word_of(raw, 2 * p + 1);
        return {pair(a, exponents), pair(permute<0x2301>(a, 0u), exponents >> 4), pair(b, exponents << 4),
            pair(permute<0x2301>(b, 0u), exponents << 8 | exponents >> 24)};
    }
    static DEVICE float value(const char* tile, int r, int k) {  // of a code, before its scale
        const char* step = tile + k / KSTEP * STEP_BYTES;
        const int t = k / 16 % 4, p = k / 8 % 2;
        const Words4 pairs = expand(*reinterpret_cast<const Words4*>(step + (4 * r + t) * 16),
            *reinterpret_cast<const uint32_t*>(step + 1024 + (4 * (r & 7) + t) * 16 + (r & 8) + 4 * p), p);
        const uint32_t pair = word_of(pairs, k / 2 % 4);
        return Bf16::up(k % 2 ? pair >> 16 : pair & 0xffffu);
    }
};
template <class F> constexpr bool COMPACT = F::VALUE_BITS == 12;

// int8 weights, row-major. GROUPS_ = 0: one scale a row; 1: groups of 64 or a multiple; 2: groups of 32, for which a
// lane takes its bytes as two runs of 8 so that no product mixes two groups.
template <int GROUPS_> struct Int8 {
    static constexpr bool QUANTIZES = true, TILED = false, SPLIT = GROUPS_ == 2, INTERLEAVED = SPLIT;
    static constexpr int KSTEP = 64, PARTS = 2, GROUPS = GROUPS_, OFFSET = OFFSET_NONE, STEP_BYTES = 64, VALUE_BITS = 8;
    static constexpr float CODE_STEP = 1.f;                 // what a code's step is worth in the products
    static constexpr DEVICE int order(int e) { return e; }  // of a chunk's values in the lanes' bytes
    static DEVICE Words4 expand(const Words4& raw, int) { return raw; }
    static DEVICE float value(const char* row, int k, float scale, float) {
        return static_cast<float>(reinterpret_cast<const int8_t*>(row)[k]) * scale;
    }
};

// Weights of a byte, row-major, one scale a row, for activations that are such bytes too, with a scale a token.
struct ByteRows {
    static constexpr bool QUANTIZES = true, TILED = false, SPLIT = false;
    static constexpr int KSTEP = 64, GROUPS = 0, OFFSET = OFFSET_NONE, STEP_BYTES = 64, VALUE_BITS = 8, TOKEN_PAD = 64;
};
template <class F> constexpr bool QUANTIZES_ROWS = std::is_base_of_v<ByteRows, F>;

// int8. LARGEST: what a token's largest magnitude becomes; Sum: of products, over all of K.
struct W8A8 : ByteRows {
    using Sum = int;
    static constexpr float LARGEST = 127.f;
    // Four values.
    static DEVICE uint32_t quantized(const float* v, float times) {
        constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: the low byte of a float of up to 2^22 plus this is its own
        uint32_t q[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) q[e] = float_to_bits(fminf(fmaxf(v[e] * times, -LARGEST), LARGEST) + ROUND);
        return permute<0x5410>(permute<0x0040>(q[0], q[1]), permute<0x0040>(q[2], q[3]));
    }
};
// fp8 e4m3.
template <bool FNUZ> struct W8A8Fp8 : ByteRows {
    using Sum = float;
    using Float = E4m3<FNUZ>;
    static constexpr float LARGEST = Float::LARGEST;
    static DEVICE uint32_t quantized(const float* v, float times) {
        return Float::rounded({v[0] * times, v[1] * times, v[2] * times, v[3] * times});
    }
};

// int4 weights in tiles of 16 rows by 128 values: 16 bytes for (row r, quarter t) at (4 r + t) * 16; word p holds
// values 32 p + 8 t + e, value e = 2 i in nibble i, e = 2 i + 1 in nibble i + 4. Scales: [tile][step][r % 8][GROUPS][r
// / 8]. A code u lies there as u - 8 in two's complement, and is multiplied as the byte 16 (u - 8). What a zero point
// or a minimum adds to that, s (8 - z) or m + 8 s, is multiplied by the sum of a group's activations.
template <int GROUPS_, int KIND> struct Int4 {
    static constexpr bool QUANTIZES = true, TILED = true, SPLIT = false, INTERLEAVED = true;
    static constexpr int KSTEP = 128, PARTS = 4, GROUPS = GROUPS_, OFFSET = KIND, STEP_BYTES = 1024, VALUE_BITS = 4;
    static constexpr float CODE_STEP = 1.f / 16;
    static constexpr DEVICE int order(int e) { return e / 2 + e % 2 * 4; }
    static DEVICE uint32_t low(uint32_t w) { return w << 4 & 0xf0f0f0f0u; }
    static DEVICE uint32_t high(uint32_t w) { return w & 0xf0f0f0f0u; }
    static DEVICE Words4 expand(const Words4& raw, int half) {
        const uint32_t a = word_of(raw, 2 * half), b = word_of(raw, 2 * half + 1);
        return {low(a), high(a), low(b), high(b)};
    }
    static DEVICE float rest(float scale, float offset) {
        return fmaf(8.f, scale, KIND == OFFSET_MINIMUM ? offset : -scale * offset);
    }
    static DEVICE float value(
        const char* row, int k, float scale, float offset) {  // `row`: the tile, and the row in it
        const uint32_t word =
            *reinterpret_cast<const uint32_t*>(row + k / KSTEP * STEP_BYTES + k / 8 % 4 * 16 + k / 32 % 4 * 4);
        const float code = static_cast<float>((word >> (4 * (k / 2 % 4) + 16 * (k % 2)) & 15u) ^ 8u);
        if (KIND == OFFSET_MINIMUM) return fmaf(code, scale, offset);
        return (code - (KIND == OFFSET_NONE ? 8.f : offset)) * scale;
    }
};

// int3 weights in tiles of 16 rows by 128 values, 768 bytes: of (row r, quarter t) two words at (4 (r % 8) + t) * 16 +
// r / 8 * 8 and a third at 512 + (4 (r % 8) + t) * 8 + r / 8 * 4. Scales, and which values are a lane's, as of int4.
// Bytes of the operands are 32 (u - 4), a code in the upper three bits; of the eight operands the first two words have
// those of two each in their upper and middle three bits, and so has the third of operands 4 and 5. The lower two bits
// are those of operands 6 and 7, whose upper bits are the lowest two of the third word.
template <int GROUPS_, int KIND> struct Int3 {
    static constexpr bool QUANTIZES = true, TILED = true, SPLIT = false, INTERLEAVED = true;
    static constexpr int KSTEP = 128, PARTS = 4, GROUPS = GROUPS_, OFFSET = KIND, STEP_BYTES = 768, VALUE_BITS = 3;
    static constexpr float CODE_STEP = 1.f / 32;
    static constexpr DEVICE int order(int e) { return e / 2 + e % 2 * 4; }
    static DEVICE uint32_t high(uint32_t w) { return w & 0xe0e0e0e0u; }
    static DEVICE uint32_t middle(uint32_t w) { return w << 3 & 0xe0e0e0e0u; }
    static DEVICE uint32_t low(uint32_t w, uint32_t third) { return (w << 5 & 0x60606060u) | (third & 0x80808080u); }
    static DEVICE Words4 expand(const Words4& raw, int half) {
        if (half == 0) return {high(raw.x), middle(raw.x), high(raw.y), middle(raw.y)};
        return {high(raw.z), middle(raw.z), low(raw.x, raw.z << 7), low(raw.y, raw.z << 6)};
    }
    static DEVICE float rest(float scale, float offset) {
        return fmaf(4.f, scale, KIND == OFFSET_MINIMUM ? offset : -scale * offset);
    }
    static DEVICE float value(const char* tile, int r, int k, float scale, float offset) {
        const char* step = tile + k / KSTEP * STEP_BYTES;
        const int place = 4 * (r & 7) + k / 8 % 4, e = k % 4 * 2 + k / 4 % 2;
        const auto* two = reinterpret_cast<const uint32_t*>(step + place * 16 + (r & 8));
        const uint32_t third = *reinterpret_cast<const uint32_t*>(step + 512 + place * 8 + (r & 8) / 2);
        const Words4 operands = expand({two[0], two[1], third, 0u}, k / 64 % 2);
        const float code =
            static_cast<float>((word_of(operands, k / 32 % 2 * 2 + e / 4) >> (8 * (e % 4) + 5) & 7u) ^ 4u);
        if (KIND == OFFSET_MINIMUM) return fmaf(code, scale, offset);
        return (code - (KIND == OFFSET_NONE ? 4.f : offset)) * scale;
    }
};
template <class F> constexpr bool THREE_BITS = F::VALUE_BITS == 3;

// The tiles of int4 with codes of a codebook, the limbs of which have products of their own.
template <int GROUPS_, int KIND> struct Codebook4 {
    using Book = CodebookOf<KIND>;
    static constexpr bool QUANTIZES = true, TILED = true, SPLIT = false, INTERLEAVED = true;
    static constexpr int KSTEP = 128, PARTS = 4, GROUPS = GROUPS_, OFFSET = KIND, STEP_BYTES = 1024, VALUE_BITS = 4,
                         LIMBS = Book::LIMBS;
    static constexpr float CODE_STEP = (Book::SIGNED(0) ? -1.f : 1.f) * Book::DIVIDED / Book::UNIT;
    static constexpr DEVICE int order(int e) { return NibbleLookup::order(e); }
    static DEVICE void expand(const Words4& raw, int half, Words4 (&w)[LIMBS]) {
        const NibbleLookup a(word_of(raw, 2 * half)), b(word_of(raw, 2 * half + 1));
        uint32_t v[4][LIMBS];
        Book::operands(a, 0, v[0]), Book::operands(a, 1, v[1]), Book::operands(b, 0, v[2]), Book::operands(b, 1, v[3]);
#pragma unroll
        for (int i = 0; i < LIMBS; ++i) w[i] = {v[0][i], v[1][i], v[2][i], v[3][i]};
    }
    static DEVICE float value(const char* row, int k, float scale, float) {
        const uint32_t word =
            *reinterpret_cast<const uint32_t*>(row + k / KSTEP * STEP_BYTES + k / 8 % 4 * 16 + k / 32 % 4 * 4);
        return Book::value(word >> (4 * (k / 2 % 4) + 16 * (k % 2)) & 15u) * scale;
    }
};
// NVFP4: codes of e2m1 in the same tiles, with a scale for each 16 values and a factor for each row. A place of the
// table has the scales of two times 16 values, e4m3.
//
// As fp16 a code times its scale is exact. Else (integer products) a product of the matrix unit is of 32 values, of
// which the lanes of two quarters have the first 16: it is taken twice, each time with zeros in place of the others'
// codes.
struct Nvfp4 {
    using Book = CodebookOf<OFFSET_E2M1>;
    static constexpr bool QUANTIZES = !HALF_WEIGHTS, TILED = true, SPLIT = false, INTERLEAVED = true;
    static constexpr int KSTEP = 128, PARTS = 4, GROUPS = 4, OFFSET = OFFSET_NVFP4, STEP_BYTES = 1024, VALUE_BITS = 4,
                         LIMBS = 2, TOKEN_PAD = 64;
    static constexpr float CODE_STEP = 1.f / Book::UNIT;
    // What a row's sum is multiplied by besides its factor: halves() gives codes times -2^-6; else the table's scales
    // are read as float16.
    static constexpr float SCALE_STEP = HALF_WEIGHTS ? -64.f : 256.f;
    static constexpr DEVICE int order(int e) { return NibbleLookup::order(e); }
    static DEVICE int chunk(int p, int quarter) { return 4 * p + quarter; }
    // Part p of a lane's rows: of both the word of codes, and of the table's place the scale of this quarter's values.
    // Four codes as e4m3, a byte each, are 2^-6 of what they stand for, and a sign is the other one, since tiles hold
    // codes with the top bit turned.
    template <class SLOT> static DEVICE void halves(const SLOT& slot, int p, Words4 (&w)[ROWS_PER_LANE]) {
        uint32_t scales[2];
        const uint32_t place = slot.scale[p] >> (fragment_quarter() < 2 ? 0 : 8);
        E4m3<false>::halves(permute<0x2200>(place, 0u), scales[0], scales[1]);
#pragma unroll
        for (int h = 0; h < ROWS_PER_LANE; ++h) {
            const uint32_t codes = word_of(slot.w[h], p);
            const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu),
                           odd = (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu);
            uint32_t v[4];
            E4m3<false>::halves(even, v[0], v[1]), E4m3<false>::halves(odd, v[2], v[3]);
#pragma unroll
            for (uint32_t& pair : v) pair = pair_fma(pair, scales[h], 0x80008000u);
            w[h] = {v[0], v[1], v[2], v[3]};
        }
    }
    static DEVICE uint32_t bytes(const NibbleLookup& codes, int half) {
        uint32_t found[Book::LIMBS];
        Book::operands(codes, half, found);
        if constexpr (Book::LIMBS == 1) return found[0];
        else return (0x80808080u + found[1] - found[0]) ^ 0x80808080u;  // magnitudes of either sign, one of them 0
    }
    static DEVICE void expand(const Words4& raw, int half, Words4 (&w)[LIMBS]) {
        const NibbleLookup a(word_of(raw, 2 * half)), b(word_of(raw, 2 * half + 1));
        const uint32_t v[4] = {bytes(a, 0), bytes(a, 1), bytes(b, 0), bytes(b, 1)},
                       first = fragment_quarter() < 2 ? ~0u : 0u;
        w[0] = {v[0] & first, v[1] & first, v[2] & first, v[3] & first};
        w[1] = {v[0] & ~first, v[1] & ~first, v[2] & ~first, v[3] & ~first};
    }
    // A scale of a place of the table, of row half * 8: of the first or of the last 16 values.
    static DEVICE float scale(uint32_t pair, int half, int last) {
        const uint32_t byte = pair >> (16 * half + 8 * last);
        return F16::up((byte & 0x80u) << 8 | (byte & 0x7fu) << 7);
    }
    // By which a row's sum is multiplied. row: in the tiles.
    static DEVICE float factor(const GemvArgs& a, int64_t row) {
        return static_cast<float>(static_cast<const double*>(a.offset)[row]) * SCALE_STEP;
    }
    static DEVICE float value(const char* row, int k, float scale, float) {
        return Codebook4<GROUPS, OFFSET_E2M1>::value(row, k, scale, 0.f);
    }
};
template <class F> constexpr bool ROW_FACTORS = F::OFFSET == OFFSET_NVFP4;
template <class F> constexpr bool CODEBOOK = F::OFFSET >= OFFSET_NF4;
// Whether a group's offset is multiplied by the sum of its activations.
template <class F> constexpr bool SUMMED = F::OFFSET == OFFSET_ZERO_POINT || F::OFFSET == OFFSET_MINIMUM;
// Whether weights are multiplied as fp16, and activations made so too: halves.h.
template <class F> constexpr bool HALVES = HALF_WEIGHTS && (ROW_FACTORS<F> || (F::VALUE_BITS == 8 && !F::QUANTIZES));
