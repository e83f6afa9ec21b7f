// Stages rows of q, k and v of the linear layer before: norm and rotary embedding, rounded where transformers rounds.
#pragma once
#include "attention_mma.h"

// Cosine and sine of float32 radians. Quarter circles are subtracted in three parts (Cody and Waite 1980); the
// polynomials are those of Moshier's Cephes.
DEVICE void cos_sin(float angle, float& cosine, float& sine) {
    const float quarters = floorf(fmaf(angle, .6366197723675814f, .5f));
    float x = fmaf(quarters, -1.5703125f, angle);
    x = fmaf(quarters, -4.837512969970703125e-4f, x), x = fmaf(quarters, -7.54978995489188216e-8f, x);
    const float z = x * x;
    const float s = fmaf(x * z, fmaf(z, fmaf(z, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f), x);
    const float c = fmaf(z * z, fmaf(z, fmaf(z, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f),
        fmaf(-.5f, z, 1.f));
    const int quadrant = int(quarters) & 3;
    cosine = quadrant & 1 ? s : c, sine = quadrant & 1 ? c : s;
    if (quadrant == 1 || quadrant == 2) cosine = -cosine;
    if (quadrant >= 2) sine = -sine;
}

// Cosines and sines [tokens][rotated / 2] of a row's positions, rounded to the activations' dtype.
template <class T> DEVICE void stage_angles(const AttentionArgs& a, float* angles, int row) {
    const int half = int(a.rotary_dim) / 2;
    for (int i = threadIdx.x; i < int(a.tokens) * half; i += THREADS) {
        float cosine, sine;
        cos_sin(static_cast<float>(a.positions[row * a.tokens + i / half]) * a.inv_freq[i % half], cosine, sine);
        angles[2 * i] = T::up(T::down(cosine * a.rope_scaling)),
                   angles[2 * i + 1] = T::up(T::down(sine * a.rope_scaling));
    }
}

// A head's row, a few columns a lane; columns past its end are zero.
template <class T, int WIDE> struct HeadRow {
    static constexpr int EACH = WIDE / WARP_SIZE;
    uint32_t own[EACH], other[EACH];  // the bits of a column, and of the column that it is rotated with
    static DEVICE int column(int e) { return lane_id() + e * WARP_SIZE; }
    // The factors of the columns and of those that they are rotated with. Unused for columns that are not rotated.
    struct Angles {
        float own[EACH], other[EACH];
        DEVICE Angles(const AttentionArgs& a, const float* angles) {
            const int half = int(a.rotary_dim) / 2;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int d = column(e);
                const float* angle = angles + 2 * (d < half ? d : d < 2 * half ? d - half : 0);
                own[e] = angle[0], other[e] = d < half ? -angle[1] : angle[1];
            }
        }
    };
    static DEVICE int partner(const AttentionArgs& a, int d) {
        const int half = int(a.rotary_dim) / 2;
        return d < half ? d + half : d < 2 * half ? d - half : d;
    }
    // late: the kernel before may not have stored all words yet; those that are SENTINEL are loaded again.
    DEVICE HeadRow(const AttentionArgs& a, const uint16_t* from, bool both, bool late) {
        load(a, from, both);
        if (LAUNCHES_OVERLAP && late)
            for (int looks = 0; any_sentinel(); load(a, from, both)) spin(looks);
    }
    DEVICE void load(const AttentionArgs& a, const uint16_t* from, bool both) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int d = column(e);
            own[e] = d < int(a.size) ? load_activation2(from + d) : 0u;
            other[e] = both && d < int(a.size) ? load_activation2(from + partner(a, d)) : 0u;
        }
    }
    DEVICE bool any_sentinel() const {
        bool any = false;
#pragma unroll
        for (int e = 0; e < EACH; ++e) any = any || own[e] == SENTINEL || other[e] == SENTINEL;
        return any;
    }
    static DEVICE uint32_t normed(const AttentionArgs& a, uint32_t bits, float factor, const uint16_t* weight, int d) {
        const float w = T::up(d < int(a.size) ? weight[d] : 0u), value = T::up(bits) * factor;
        return T::down(a.plus_one ? value * (w + 1.f) : T::up(T::down(value)) * w);
    }
    // Applies the norm with `weight`, unless it is null, and the rotary embedding. Precondition: all lanes of the warp
    // call it.
    DEVICE void rotate(const AttentionArgs& a, const uint16_t* weight, const Angles& angles) {
        if (weight) {
            float squares = 0.f;
#pragma unroll
            for (int e = 0; e < EACH; ++e) squares = fmaf(T::up(own[e]), T::up(own[e]), squares);
            for (int step = 1; step < WARP_SIZE; step *= 2) squares += lane_xor(squares, step);
            const float factor = rsqrtf(squares / static_cast<float>(a.size) + a.epsilon);
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                own[e] = normed(a, own[e], factor, weight, column(e)),
                other[e] = normed(a, other[e], factor, weight, partner(a, column(e)));
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const uint32_t parts = T::down_pair(T::up(own[e]) * angles.own[e], T::up(other[e]) * angles.other[e]);
            const uint32_t rotated = T::down(T::up(parts & 0xffffu) + T::up_high(parts));
            own[e] = column(e) < int(a.rotary_dim) ? rotated : own[e];
        }
    }
    DEVICE void leave(char* into, int columns) const {
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (column(e) < columns) reinterpret_cast<uint16_t*>(into)[column(e)] = static_cast<uint16_t>(own[e]);
    }
    // The largest magnitude; NaN for a row with NaN. Precondition: all lanes of the warp call it.
    DEVICE float largest() const {
        float most = 0.f, odd = 0.f;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const float v = T::up(own[e]);
            most = fmaxf(most, fabsf(v)), odd += v == v ? 0.f : v;
        }
        for (int step = 1; step < WARP_SIZE; step *= 2)
            most = fmaxf(most, lane_xor(most, step)), odd += lane_xor(odd, step);
        return most + odd;
    }
    // Quantises the row; returns the scale. A row with NaN has scale NaN.
    DEVICE uint16_t encode() {
        const uint32_t scale = Bf16::down(largest() / T::Codes::LARGEST);
        const float by = Bf16::up(scale);
        const bool fit = by > 0.f && by < INFINITY;
#pragma unroll
        for (int e = 0; e < EACH; ++e) own[e] = fit ? T::Codes::rounded(T::up(own[e]) / by) : 0u;
        return static_cast<uint16_t>(scale);
    }
    // Stores a query in the form that matrix instructions with codes take, followed by its scale.
    DEVICE void leave_scaled(char* into) const {
        const float scale = QueryForm<T>::scale(largest()), by = 1.f / scale;
        const bool fit = scale > 0x1p-100f && scale < INFINITY;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            QueryForm<T>::template store<WIDE>(into, column(e), fit ? T::up(own[e]) * by : 0.f);
        if (lane_id() == 0) *reinterpret_cast<float*>(into + WIDE * 2) = scale;
    }
    DEVICE void leave_codes(char* into, int columns) const {
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (column(e) < columns) into[column(e)] = static_cast<char>(own[e]);
    }
};

// Stages what a block's segments need of the linear layer before: the queries of a head, and its new keys and values.
template <class T, int WIDE> struct HeadStager {
    using Angles = typename HeadRow<T, WIDE>::Angles;
    static constexpr int STRIDE = WIDE * 2 + 16;  // bytes of a row
    const AttentionArgs& a;
    const AttentionPlan& plan;
    char* shared;
    const bool words;  // whether words of q and k are SENTINEL until they are stored, and have to be waited for
    int row = -1;

    DEVICE char* query(int q) const { return shared + plan.queries_at + q * STRIDE; }
    DEVICE char* fresh(int token, int value) const { return shared + plan.fresh_at + (token * 2 + value) * STRIDE; }
    DEVICE float* angles(int token) const {
        return reinterpret_cast<float*>(shared + plan.angles_at) + token * a.rotary_dim;
    }
    DEVICE int queries(const Segment& s) const { return min(QUERIES, int(a.tokens) * plan.group - s.tile * QUERIES); }
    DEVICE const char* value(int token) const { return fresh(token, 1); }

    DEVICE const float* query_scale(int q) const { return reinterpret_cast<const float*>(query(q) + WIDE * 2); }
    // A piece of a new key or value.
    template <class PIECE> DEVICE PIECE fresh_piece(int token, int value, int chunk) const {
        return reinterpret_cast<const PIECE*>(fresh(token, value))[chunk];
    }
    // For caches of codes: where the scale of a new key or value is; and both scales of a token, the value's in the
    // upper half. The value of a single token comes later, and is added by itself.
    DEVICE uint16_t* fresh_scale(int token, int value) const {
        return reinterpret_cast<uint16_t*>(fresh(token, value) + WIDE * 2);
    }
    DEVICE uint32_t fresh_scales(int token) const {
        return *fresh_scale(token, 0) | (a.tokens > 1 ? uint32_t(*fresh_scale(token, 1)) << 16 : 0u);
    }
    // Stages a row's angles, which do not depend on the kernel before. It ends with a barrier.
    DEVICE void switch_to(int other) {
        if (other == row) return;
        row = other;
        stage_angles<T>(a, angles(0), row);
        __syncthreads();
    }
    // One row of a segment: a query, or a new key or value.
    struct Task {
        const uint16_t *from, *norm;
        char *into, *kept;                   // shared memory; the cache, or null
        uint16_t *fresh_scale, *kept_scale;  // of codes, or null
        int token;
        bool rotated;
    };
    DEVICE Task task(const Segment& s, int i) const {
        const int count = queries(s), rest = i - count, value = rest & 1;
        const bool mine = rest < 0;
        const int q = s.tile * QUERIES + i,
                  token = min(mine ? q / plan.group : rest / 2, int(a.tokens) - 1);  // past the last task: any
        const int of =
            mine ? s.kv * plan.group + q - token * plan.group : int(a.heads) + value * int(a.kv_heads) + s.kv;
        Task t = {static_cast<const uint16_t*>(a.qkv) +
                      ((s.row * a.tokens + token) * (a.heads + 2 * a.kv_heads) + of) * a.size,
            static_cast<const uint16_t*>(mine ? a.q_norm : a.k_norm), mine ? query(i) : fresh(token, value), nullptr,
            mine ? nullptr : fresh_scale(token, value), nullptr, token, mine || !value};
        if (!mine && s.tile == 0) {
            const int64_t slot = (s.row * a.kv_heads + s.kv) * a.capacity + s.slot + token;
            t.kept = static_cast<char*>(value ? a.values : a.keys) + slot * a.size * CACHE_BYTES<T>;
            if (CODED<T>) t.kept_scale = (value ? +a.value_scales : +a.key_scales) + slot;
        }
        return t;
    }
    // Stores a row in shared memory, and a new key or value in the cache as well: every block of the head stores the
    // same.
    DEVICE void leave(HeadRow<T, WIDE>& row, const Task& t) const {
        if constexpr (CODED<T>) {
            if (t.fresh_scale) {
                const uint16_t scale = row.encode();
                row.leave_codes(t.into, WIDE);
                if (t.kept) row.leave_codes(t.kept, int(a.size));
                if (lane_id() == 0) *t.fresh_scale = scale;
                if (lane_id() == 0 && t.kept) *t.kept_scale = scale;
                return;
            }
            if constexpr (QueryForm<T>::SCALED) return row.leave_scaled(t.into);
        }
        row.leave(t.into, WIDE);
        if (t.kept) row.leave(t.kept, int(a.size));
    }
    // Stages a segment's rows. Precondition: all threads of the block call it. It ends with a barrier: the rows are
    // visible to all threads when it returns. first: the warp's task(); rotation: its angles.
    DEVICE void stage(const Segment& s, Task first, Angles rotation) {
        // Where the kernel before signals q and k, the new token's value is not there yet (wait_for_value).
        const int tasks = queries(s) + (a.consumer ? 1 : 2 * int(a.tokens));
        for (int i = threadIdx.x / WARP_SIZE; i < tasks;) {
            HeadRow<T, WIDE> row(a, first.from, first.rotated, words);
            if (first.rotated) row.rotate(a, first.norm, rotation);
            leave(row, first);
            if ((i += WARPS) < tasks) first = task(s, i), rotation = Angles(a, angles(first.token));
        }
        __syncthreads();
    }
    // Stages the value of the single new token, by the calling warp.
    DEVICE void stage_value(const Segment& s) const {
        const Task t = task(s, queries(s) + 1);
        HeadRow<T, WIDE> row(a, t.from, false, false);
        leave(row, t);
    }
    // After the last KV split, which begins at slot `begin`: waits for the end of the kernel before, then stages the
    // new token's value where its slot is in this split. Precondition: all threads call it, and a barrier follows.
    DEVICE void wait_for_value(const Segment& s, int begin, int warp) const {
        grid_wait();
        if (begin + KV_SPLIT > s.slot && warp == WARPS - 1) stage_value(s);
    }
};
