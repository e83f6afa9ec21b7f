// LoRA adapters inside a linear layer: y[M, N] = epilogue(x w^T + bias + (x down^T) up^T). Sources that define LOW_RANK
// have them.
//
// x down^T is split into pieces, each a part of K of one row of `down`; a block has one piece or none. It prefetches
// its part of `down` into L2 before it waits for x, multiplies it once its own x is staged, and stores a sum for each
// token. All blocks of the launch read these sums halfway through their first tile, while weights are being loaded;
// rows of `up` are in L2 by then. So adapters need no launch of their own, and no block waits idle for another.
//
// Launches use two buffers of sums alternately. Each fills the buffer that it does not use with NO_LOW, so that the
// next launch finds only what its own blocks have stored. Where blocks of a launch cannot wait for each other, a launch
// before computes the sums, in the first buffer.
#pragma once
#include "norm.h"

constexpr int LOW_TOKENS = 8;    // of a piece: 32 bytes
constexpr int MOST_PIECES = 8;   // of a row
constexpr int MOST_RANKS = 512;  // their sums lie in shared memory
constexpr uint32_t NO_LOW = 0xffffffffu;

// How many pieces a row of `down` has. It depends neither on the device nor on the number of blocks, so that a result's
// bits do not either. A lane, or an aligned run of lanes, reads a row's sums.
DEVICE int low_pieces(const GemvArgs& a) {
    return a.ranks <= 16 ? MOST_PIECES : a.ranks <= 32 ? 4 : a.ranks <= 64 ? 2 : 1;
}
DEVICE int64_t buffer_words(const GemvArgs& a) { return int64_t(a.ranks) * MOST_PIECES * LOW_TOKENS; }
// In shared memory: here[8 tokens][ranks], scratch[8][THREADS / 32], and a word.
DEVICE float* low_here(const GemvPlan& plan, char* shared) { return reinterpret_cast<float*>(shared + plan.low_at); }

DEVICE float* low_scratch(const GemvArgs& a, float* here) { return here + LOW_TOKENS * a.ranks; }
DEVICE int& low_parity(const GemvArgs& a, float* here) {
    return reinterpret_cast<int&>(low_scratch(a, here)[LOW_TOKENS * (THREADS / 32)]);
}
// Decides which of the two buffers this launch uses. Precondition: every thread calls it once, after the wait for the
// end of the kernel before, so that no block of another launch counts meanwhile; a barrier follows. The lower half of
// the counter counts the blocks of a launch, the upper half launches; the last block resets the lower half to zero.
DEVICE void begin_low(const GemvArgs& a, float* here) {
    if (!BLOCKS_MEET || threadIdx.x != THREADS - 1) return;
    auto* number = reinterpret_cast<int32_t*>(a.low + 2 * buffer_words(a));
    const int before = count_up(number, 1), blocks = int(gridDim.x);
    if ((before & 0xffff) == blocks - 1) count_up(number, 0x10000 - blocks);
    low_parity(a, here) = before >> 16 & 1;
}

// A piece of a row of `down`: its chunks of 8 values from `begin` to `end`.
struct LowPiece {
    const char* row;
    int begin, end;
    DEVICE LowPiece(const GemvArgs& a, int item)
        : row(static_cast<const char*>(a.down) + int64_t(item / low_pieces(a)) * a.k * 2) {
        const int chunks = int((a.k + 7) / 8), each = (chunks + low_pieces(a) - 1) / low_pieces(a);
        begin = item % low_pieces(a) * each, end = min(begin + each, chunks);
    }
    DEVICE void prefetch() const {
        for (int c = begin + int(threadIdx.x) * 8; c < end; c += THREADS * 8) prefetch_line(row + c * 16);
    }
};

// Multiplies the pieces `block`, `block` + `blocks` and so on with all tokens and stores the sums in the buffer `into`.
// Precondition: every thread of the block calls it, the norm's moments are visible, and no thread uses `scratch`. It
// has a barrier before and one after each piece's reduction. AT_ONCE: tokens whose loads overlap.
template <class T, int AT_ONCE, class NORMS>
DEVICE void multiply_down(const GemvArgs& a, const NORMS& norms, float* into, float* scratch, int block, int blocks) {
    constexpr int BANDS = THREADS / 32;
    const int m = int(a.m);
#pragma unroll 1
    for (int item = block; item < a.ranks * low_pieces(a); item += blocks) {
        const LowPiece piece(a, item);
#pragma unroll 1
        for (int token = 0; token < m; token += AT_ONCE) {
            float sum[AT_ONCE], mean[AT_ONCE], scale[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int other = min(token + i, m - 1);
                sum[i] = 0.f, mean[i] = a.norm ? norms.mean(other) : 0.f, scale[i] = a.norm ? norms.scale(other) : 0.f;
            }
#pragma unroll 1
            for (int c = piece.begin + threadIdx.x; c < piece.end; c += THREADS) {
                Words4 x[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) x[i] = norms.load(min(token + i, m - 1), c * 8);
                const Words4 times = a.norm ? norms.weight(c * 8) : Words4{0, 0, 0, 0},
                             down = load_chunk(piece.row, c * 8, int(a.k), a.k % 8 == 0);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (a.norm) x[i] = norms.apply(x[i], times, c * 8, mean[i], scale[i]);
                    float v[8], w[8];
                    unpack<T>(x[i], v), unpack<T>(down, w);
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum[i] = fmaf(v[e], w[e], sum[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float all = run_sum(sum[i], 32);
                if (threadIdx.x % 32 == 0 && token + i < m) scratch[(token + i) * BANDS + threadIdx.x / 32] = all;
            }
        }
        __syncthreads();
        if (threadIdx.x < LOW_TOKENS / 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = threadIdx.x * 4 + i;
                float sum = 0.f;
                for (int band = 0; band < (token < m ? BANDS : 0); ++band) sum += scratch[token * BANDS + band];
                words[i] = sum == sum ? float_to_bits(sum) : 0x7fc00000u;  // a NaN, but never NO_LOW
            }
            store_relaxed16(into + item * LOW_TOKENS + threadIdx.x * 4, {words[0], words[1], words[2], words[3]});
        }
        __syncthreads();
    }
}
// Reads part `part` of `parts` of the sums into shared memory, and spins until other blocks have stored them.
// Precondition: every lane of the warp calls it. A barrier must follow before others read them.
DEVICE void collect_low(const GemvArgs& a, const float* from, float* here, int part, int parts) {
    const int pieces = low_pieces(a), items = a.ranks * pieces, m = int(a.m);
#pragma unroll 1
    for (int base = part * WARP_SIZE; base < items; base += parts * WARP_SIZE) {
        const int item = base + lane_id(), there = min(item, items - 1);
#pragma unroll 1
        for (int token = 0; token < m; token += 4) {
            const float* at = from + there * LOW_TOKENS + token;
            Words4 v = load_relaxed16(at);
            const auto missing = [&]() ALWAYS_INLINE {
                return v.x == NO_LOW || v.y == NO_LOW || v.z == NO_LOW || v.w == NO_LOW;
            };
            for (int looks = 0; BLOCKS_MEET && missing(); v = load_relaxed16(at)) spin(looks);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (token + i >= m) break;
                const float sum = run_sum(bits_to_float(word_of(v, i)), pieces);
                if (item < items && item % pieces == 0) here[(token + i) * a.ranks + item / pieces] = sum;
            }
        }
    }
}
DEVICE const uint16_t* row_of_up(const GemvArgs& a, int n) {
    return static_cast<const uint16_t*>(a.up) + int64_t(n) * a.rank;
}
// The sum that the adapters add to a token's output of row n of w.
template <class T> DEVICE float low_rank_sum(const GemvArgs& a, const float* here, int token, int n) {
    const int part = (n >= a.second_part) + (n >= a.third_part);
    const float* low = here + token * a.ranks + part * a.rank;
    const uint16_t* up = row_of_up(a, n);
    float sum = 0.f;
#pragma unroll 2
    for (int r = 0; r < a.rank; r += 8) {
        float w[8];
        unpack<T>(load_activation16(up + r), w);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(w[e], low[r + e], sum);
    }
    return sum;
}

// A warp's work on the adapters within gemv_kernel.h. here: in shared memory, see low_here(). wk: its number of the
// `warps` that share a tile. The constructor prefetches what is constant: a piece of `down`, and rows of `up` for the
// warp's part of the block's tiles.
template <class T, bool NARROW> struct Adapters {
    const GemvArgs& a;
    float* const here;
    const int wk, warps, blocks;  // blocks: those with tiles
    enum { BEGUN, MULTIPLIED, COLLECTED } state = BEGUN;
    DEVICE Adapters(const GemvArgs& a, const GemvPlan& plan, float* here, int wk, int warps, int first_tile)
        : a(a),
          here(here),
          wk(wk),
          warps(warps),
          blocks(min(int(gridDim.x), plan.tiles)) {
        if (BLOCKS_MEET && int(blockIdx.x) < a.ranks * low_pieces(a)) LowPiece(a, int(blockIdx.x)).prefetch();
        for (int tile = first_tile + wk * plan.tile_hop; tile < plan.tiles; tile += warps * plan.tile_hop)
            prefetch_up(tile);
    }
    DEVICE float* buffer(int number) const { return a.low + number * buffer_words(a); }
    DEVICE int parity() const { return BLOCKS_MEET ? low_parity(a, here) : 0; }
    // Prefetches the rows of `up` of a tile into L2. Precondition: every lane of the warp calls it.
    DEVICE void prefetch_up(int tile) const {
        const bool gate = a.activation == ACT_SILU_GATE;
        const int half = int(a.n / 2), rows = gate ? 8 : 16, limit = gate ? half : int(a.n);
        for (int at = lane_id() * 64; at < rows * a.rank; at += WARP_SIZE * 64) {
            const int n = tile * rows + at / a.rank;
            if (n >= limit) break;
            prefetch_line(row_of_up(a, tile * rows) + at);
            if (gate) prefetch_line(row_of_up(a, tile * rows + half) + at);
        }
    }
    // Multiplies the block's pieces, the first time it is called. Precondition: every thread of the block calls it,
    // once activations are staged. It also fills the block's part of the other buffer with NO_LOW, for the next launch.
    template <class NORMS> DEVICE void multiply(const NORMS& norms) {
        if (!BLOCKS_MEET || state != BEGUN) return;
        state = MULTIPLIED;
        multiply_down<T, NARROW ? 1 : 4>(a, norms, buffer(parity()), low_scratch(a, here), int(blockIdx.x), blocks);
        float* other = buffer(1 - parity());
#pragma unroll 1
        for (int64_t at = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * 4; at < buffer_words(a);
            at += int64_t(blocks) * THREADS * 4)
            store_relaxed16(other + at, {NO_LOW, NO_LOW, NO_LOW, NO_LOW});
    }
    // Reads the warp's part of the sums into shared memory. Precondition: every lane of the warp calls it, after
    // multiply() and before the barrier of the first outputs, which makes the sums visible to all.
    DEVICE void collect() {
        collect_low(a, buffer(parity()), here, wk, warps);
        state = COLLECTED;
    }
    DEVICE bool collected() const { return state == COLLECTED; }
};

// A launch of its own that computes the sums beforehand, on hardware where blocks of a launch cannot wait for each
// other. Each block computes the norm's moments for itself.
template <class T> __global__ void __launch_bounds__(THREADS) low_rank_kernel(const GemvArgs a, const GemvPlan plan) {
    extern __shared__ __align__(128) char shared[];
    using Moments = Norms<T, false, false>;
    const Moments norms(a, plan, shared);
    if (a.norm != NORM_NONE) {
        for (int pass = norms.layer() ? 0 : 1; pass < 2; ++pass) {
            for (int token = 0; token < int(a.m); ++token) {
                const float mean = pass ? norms.mean(token) : 0.f;
                float partial = 0.f;
                for (int at = threadIdx.x * 8; at < int(a.k); at += THREADS * 8) {
                    const Words4 x = norms.load(token, at);
                    partial += pass ? norms.squares_of(x, at, mean) : Moments::sum_of(x);
                }
                Moments::leave(pass ? norms.squares() : norms.sums(), token, partial);
            }
            __syncthreads();
        }
    }
    multiply_down<T, 4>(a, norms, a.low, low_here(plan, shared), int(blockIdx.x), int(gridDim.x));
}
