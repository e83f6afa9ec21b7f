// Products with codes, as NVIDIA's matrix units take them. Bytes go to integer products as they are: queries and
// weights are 16-bit integers, in two limbs, and sums are exact. 8-bit floats become fp16, times queries and weights in
// fp16. Both kinds are relative to a query's largest number, and to the largest weight of a warp's tiles. Part of
// attention_mma.h.
#pragma once

// Two neighbouring codes are read across as one 16-bit number: of sixteen columns a lane has an even one and the odd
// one behind it.
template <class T, class CODES> struct CacheTile<Coded<T, CODES>> : AttentionTile<Coded<T, CODES>> {
    static DEVICE int cell_column(int part, int i) { return part * 16 + 2 * (lane_id() >> 2) + (i >> 1); }
    // Chunks `chunk` and the one behind it, of sixteen columns of all slots: of the first slots 0 to 7 and 8 to 15 in
    // v[0] and v[2], of the second in v[1] and v[3].
    static DEVICE void load_across(uint32_t* v, const Words4* tile, int chunks, int chunk) {
        using Tile = AttentionTile<Coded<T, CODES>>;
        const int slot = (lane_id() & 7) + (lane_id() >> 4) * 8;
        const int swizzle = chunks < 8 ? slot >> 1 & 3 : Tile::swizzle(slot);
        load_transposed(v, tile + slot * chunks + chunk / 8 * 8 + ((lane_id() >> 3 & 1) ^ swizzle ^ chunk % 8));
    }
};
DEVICE float larger_or_nan(float v, float w) { return v > w || v != v ? v : w; }

// The largest weight of each of a lane's queries, and what makes it LARGEST: no weight is negative. Weights below
// 2^-100 of it need not be seen; what is not finite gives a largest weight that is not.
template <class T, int OWN> struct LargestWeight {
    using Tile = CacheTile<T>;
    float largest[OWN], inverse[OWN];
    DEVICE void find(const float (&s)[ROUNDS][4], float most) {
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            float v = 0x1p-100f;
#pragma unroll
            for (int i = 0; i < 4 * ROUNDS; ++i)
                if (Tile::query_index(i % 4) == n) v = larger_or_nan(s[i / 4][i % 4], v);
            largest[n] = Tile::reduce_lanes(v, [](float one, float other) { return larger_or_nan(one, other); });
            inverse[n] = rounded_multiply(fast_reciprocal(largest[n]), most);
        }
    }
};

// ---- int8 ----
// A query: the upper limbs of all columns, then the lower ones, both signed.
template <class T> struct QueryForm<Coded<T, Int8Codes>> {
    static constexpr bool SCALED = true;
    static constexpr float LARGEST = 32639.f;  // 127 256 + 127
    static DEVICE float scale(float most) { return most / LARGEST; }
    template <int WIDE> static DEVICE void store(char* row, int column, float v) {
        const int all = static_cast<int>(fminf(fmaxf(rintf(v), -LARGEST), LARGEST)), high = (all + 128) >> 8;
        row[column] = static_cast<char>(high), row[WIDE + column] = static_cast<char>(all - high * 256);
    }
};

// Products of sixteen columns. Of a sole query the limbs are columns of one product, the even and the odd ones alike.
template <class T, int WIDE, bool SOLE>
struct KeyMma<Coded<T, Int8Codes>, WIDE, SOLE> : CacheTile<Coded<T, Int8Codes>> {
    int first[4], second[4];  // of the upper and the lower limb; of a sole query two chains
    DEVICE void zero() {
        for (int i = 0; i < 4; ++i) first[i] = second[i] = 0;
    }
    struct Query {
        Words4 limbs[SOLE ? 1 : 2];
    };
    static DEVICE Query query(const Words4* from, int chunk) {
        if constexpr (SOLE) return {{from[(lane_id() >> 2 & 1) * (WIDE / 16) + chunk]}};
        else return {{from[chunk], from[WIDE / 16 + chunk]}};
    }
    DEVICE void add(const Query& q, const Words4* k) {
        const Words4& one = q.limbs[0];
        multiply_bytes(first, k[0].x, k[1].x, k[0].y, k[1].y, one.x, one.y, true);
        multiply_bytes(SOLE ? second : first, k[0].z, k[1].z, k[0].w, k[1].w, one.z, one.w, true);
        if constexpr (!SOLE) {
            const Words4& other = q.limbs[1];
            multiply_bytes(second, k[0].x, k[1].x, k[0].y, k[1].y, other.x, other.y, true);
            multiply_bytes(second, k[0].z, k[1].z, k[0].w, k[1].w, other.z, other.w, true);
        }
    }
    DEVICE float score(int i) const {
        if constexpr (SOLE) return float((first[i & 2] + second[i & 2]) * 256 + first[i | 1] + second[i | 1]);
        else return float(first[i] * 256 + second[i]);
    }
};

// Weights are integers of 16 bits without a sign, in two limbs.
template <class T, int SETS, bool SOLE> struct ValueMma<Coded<T, Int8Codes>, SETS, SOLE> {
    using Tile = CacheTile<Coded<T, Int8Codes>>;
    static constexpr int OWN = SOLE ? 1 : Tile::QUERIES_PER_LANE, LIMBS = SOLE ? 1 : 2;
    static constexpr float LARGEST = 65535.f;
    using Sums = float[SETS][Tile::PARTS][4];
    struct Weights {
        uint32_t limbs[LIMBS];  // the upper one, then the lower; of a sole query that of the lane's column
    };
    Sums& sums;
    int whole[SETS][Tile::PARTS][4];  // of a sole query a limb each of its even and odd ones
    LargestWeight<Coded<T, Int8Codes>, OWN> weight;
    DEVICE explicit ValueMma(Sums& sums) : sums(sums) { zero_all(whole); }
    DEVICE void scale(const float (&s)[ROUNDS][4]) { weight.find(s, LARGEST); }
    // In the lower half of a float, 2^23 larger.
    DEVICE uint32_t integer(float s, int which) const {
        return float_to_bits(fmaf(s, weight.inverse[SOLE ? 0 : which], 0x1p23f));
    }
    DEVICE uint32_t slots_of_query(float even, float odd) const {
        const uint32_t one = integer(even, 0);
        return transposed(permute<0x5410>(one, SOLE ? one : integer(odd, 1)));
    }
    DEVICE Weights weights(const float* s) const {
        const uint32_t early = slots_of_query(s[0], s[1]), late = slots_of_query(s[2], s[3]),
                       high = permute<0x7531>(early, late), low = permute<0x6420>(early, late);
        if constexpr (SOLE) return {lane_id() >> 2 & 1 ? low : high};
        else return {high, low};
    }
    DEVICE void add(const Words4* values, int chunks, const Weights& w) {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int part = 0; part < Tile::PARTS; part += 2) {
                uint32_t v[4];
                Tile::load_across(v, values, chunks, set * Tile::PARTS + part);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t even = permute<0x6420>(v[i], v[i + 2]), odd = permute<0x7531>(v[i], v[i + 2]);
                    int(&all)[4] = whole[set][part + i];
                    multiply_bytes(all, even, odd, w.limbs[LIMBS - 1]);
                    if constexpr (!SOLE) {
                        int high[4] = {0, 0, 0, 0};
                        multiply_bytes(high, even, odd, w.limbs[0]);
#pragma unroll
                        for (int c = 0; c < 4; ++c) all[c] += high[c] * 256;
                    }
                }
            }
    }
    DEVICE void finish() {
        float unit[OWN];
#pragma unroll
        for (int n = 0; n < OWN; ++n) unit[n] = rounded_multiply(weight.largest[n], 1.f / LARGEST);
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const auto& all = whole[set][part];
                    const int v = SOLE ? all[i & 2] * 256 + all[i | 1] : all[i];
                    sums[set][part][i] = rounded_multiply(float(v), unit[SOLE ? 0 : Tile::query_index(i)]);
                }
    }
};

// ---- fp8 ----
// A query in fp16, of which the largest number is 1 to 2: no bit is lost of what is not 2^-14 times smaller.
template <class T> struct QueryForm<Coded<T, E4m3Codes>> {
    static constexpr bool SCALED = true;
    static DEVICE float scale(float most) { return bits_to_float(float_to_bits(most) & 0x7f800000u); }
    template <int WIDE> static DEVICE void store(char* row, int column, float v) {
        reinterpret_cast<uint16_t*>(row)[column] = static_cast<uint16_t>(F16::down(v));
    }
};

template <class T, int WIDE, bool SOLE>
struct KeyMma<Coded<T, E4m3Codes>, WIDE, SOLE> : CacheTile<Coded<T, E4m3Codes>> {
    DEVICE void add_word(int chain, uint32_t one, uint32_t other, uint32_t q0, uint32_t q1) {
        uint32_t a[2][2];
        E4m3<false>::halves(one, a[0][0], a[0][1]), E4m3<false>::halves(other, a[1][0], a[1][1]);
        multiply_halves<F16>(this->c[chain], a[0][0], a[1][0], a[0][1], a[1][1], q0, q1);
    }
    struct Query {
        Words4 first, second;  // eight columns, and eight
    };
    static DEVICE Query query(const Words4* from, int chunk) { return {from[2 * chunk], from[2 * chunk + 1]}; }
    DEVICE void add(const Query& q, const Words4* k) {
        const Words4 &v = q.first, &w = q.second;
        add_word(0, k[0].x, k[1].x, v.x, v.y), add_word(1, k[0].y, k[1].y, v.z, v.w);
        add_word(0, k[0].z, k[1].z, w.x, w.y), add_word(1, k[0].w, k[1].w, w.z, w.w);
    }
};

template <class T, int SETS, bool SOLE> struct ValueMma<Coded<T, E4m3Codes>, SETS, SOLE> {
    using Tile = CacheTile<Coded<T, E4m3Codes>>;
    static constexpr int OWN = SOLE ? 1 : Tile::QUERIES_PER_LANE;
    using Sums = float[SETS][Tile::PARTS][4];
    struct Weights {
        uint32_t early, late;  // of slots below 8, and of those from it on
    };
    Sums& sums;
    LargestWeight<Coded<T, E4m3Codes>, OWN> weight;
    DEVICE explicit ValueMma(Sums& sums) : sums(sums) { zero_all(sums); }
    DEVICE void scale(const float (&s)[ROUNDS][4]) { weight.find(s, 1.f); }
    DEVICE uint32_t slots_of_query(float even, float odd) const {
        const float one = even * weight.inverse[0], other = SOLE ? 0.f : odd * weight.inverse[OWN - 1];
        return transposed(F16::down_pair(one, other));
    }
    DEVICE Weights weights(const float* s) const { return {slots_of_query(s[0], s[1]), slots_of_query(s[2], s[3])}; }
    DEVICE void add(const Words4* values, int chunks, const Weights& w) {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int part = 0; part < Tile::PARTS; part += 2) {
                uint32_t v[4];
                Tile::load_across(v, values, chunks, set * Tile::PARTS + part);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint32_t early[2], late[2];  // the even columns, and the odd ones
                    E4m3<false>::halves(permute<0x3120>(v[i], v[i]), early[0], early[1]);
                    E4m3<false>::halves(permute<0x3120>(v[i + 2], v[i + 2]), late[0], late[1]);
                    multiply_halves<F16>(sums[set][part + i], early[0], early[1], late[0], late[1], w.early, w.late);
                }
            }
    }
    DEVICE void finish() {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[set][part][i] =
                        rounded_multiply(sums[set][part][i], weight.largest[SOLE ? 0 : Tile::query_index(i)]);
    }
};
