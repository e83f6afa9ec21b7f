// One-shot all-reduce of small messages: y = sum over ranks of x, plus a residual, in one launch on each rank.
//
// Each thread has one vector of 16 bytes. It stores it into the memory of all other ranks, waits until theirs have come
// into its own, and adds them up in float32 in the ranks' order, so that every rank has the same bits each time. Words
// that have not come yet hold SENTINEL_WORD, which no rank sends: there are no flags, and a message takes one way over
// the link. (LL128 and "Lamport" of NCCL and TensorRT-LLM are of this kind.)
//
// The memory has three slots. A launch uses one, and fills the one of the launch before with sentinels. A rank writes
// into a slot again three launches later. It does so only after its launch before has ended, which had this rank's
// message of its own launch before, and that began after this rank had read and reset the slot. All this holds for each
// block by itself, which is why each has a slot number of its own, and messages of any sizes may follow each other.
#pragma once
#include "arch/host.h"
#include "arch/peer_access.h"

constexpr int MOST_RANKS = 8, SLOTS = 3;
constexpr int VECTORS = 128, MOST_BLOCKS = 128;  // of a block, one for each thread; of a launch
constexpr uint32_t SENTINEL_WORD = 0xffffffffu;  // a NaN in each of the formats; a message's own loses a bit

struct PushArgs {
    void* memory[MOST_RANKS];  // of each rank: [SLOTS][world][MOST_BLOCKS * VECTORS] vectors
    int32_t* slots;            // [MOST_BLOCKS], this rank's, zeros at first
    int32_t* failed;           // set where `patience` was not enough
    const void* x;             // [vectors]
    const void* residual;      // likewise, or null
    void* y;                   // likewise; may be x
    int64_t vectors;
    int32_t rank, world;
    int32_t patience;  // how often a thread looks for the others' words; 0: for ever
};

struct F32 {};  // a third dtype, in addition to Bf16 and F16
template <class T> struct Vector {
    static constexpr int COUNT = 8;
    static DEVICE void up(const Words4& v, float* out) { unpack<T>(v, out); }
    static DEVICE Words4 down(const float* v) { return pack<T>(v); }
};
template <> struct Vector<F32> {
    static constexpr int COUNT = 4;
    static DEVICE void up(const Words4& v, float* out) {
        for (int i = 0; i < 4; ++i) out[i] = bits_to_float(word_of(v, i));
    }
    static DEVICE Words4 down(const float* v) {
        return {float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]), float_to_bits(v[3])};
    }
};

DEVICE bool has_sentinel(const Words4& v) {
    return v.x == SENTINEL_WORD || v.y == SENTINEL_WORD || v.z == SENTINEL_WORD || v.w == SENTINEL_WORD;
}
DEVICE uint32_t sendable(uint32_t word) { return word == SENTINEL_WORD ? 0x7fff7fffu : word; }
DEVICE Words4 sendable(const Words4& v) { return {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)}; }

// Where a vector from rank `from` goes in a rank's memory.
DEVICE Words4* place(const PushArgs& a, void* memory, int slot, int from, int at) {
    return static_cast<Words4*>(memory) + (int64_t(slot) * a.world + from) * (MOST_BLOCKS * VECTORS) + at;
}

// RANKS: at least `world`. Precondition: all ranks launch the same sizes in the same order.
template <class T, int RANKS> DEVICE void push_and_add(const PushArgs& a, int block) {
    using V = Vector<T>;
    const int at = block * VECTORS + int(threadIdx.x), rank = a.rank;
    const bool there = at < a.vectors;
    grid_wait();     // all earlier launches have ended; so they have for a launch that begins early after this one
    grid_release();  // the next launch may prefetch its weights while this one waits
    const int slot = int(load_activation4(a.slots + block)), last = slot == 0 ? SLOTS - 1 : slot - 1;
    void* here = a.memory[0];
#pragma unroll
    for (int r = 1; r < RANKS; ++r) here = r == rank ? a.memory[r] : here;  // no table in local memory
    Words4 mine = {0, 0, 0, 0}, parts[RANKS];
    if (there) {
        mine = sendable(load_activation16(static_cast<const Words4*>(a.x) + at));
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r < a.world && r != rank) store_system16(place(a, a.memory[r], slot, rank, at), mine);
    }
    const Words4 sentinels = {SENTINEL_WORD, SENTINEL_WORD, SENTINEL_WORD, SENTINEL_WORD};
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
        if (r < a.world && r != rank) store_system16(place(a, here, last, r, at), sentinels);
    if (there) {
        const Words4 residual = load_activation16(static_cast<const Words4*>(a.residual) + at, a.residual != nullptr);
#pragma unroll 1
        for (int looks = 1;; ++looks) {
            bool missing = false;
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                parts[r] = r < a.world && r != rank ? load_system16(place(a, here, slot, r, at)) : mine;
                missing |= has_sentinel(parts[r]);
            }
            if (!missing) break;
            if (looks == a.patience) {
                *a.failed = 1;
                break;
            }
            backoff(looks);
        }
        float sum[V::COUNT], more[V::COUNT];
        V::up(parts[0], sum);
#pragma unroll
        for (int r = 1; r < RANKS; ++r) {
            if (r >= a.world) continue;
            V::up(parts[r], more);
            for (int i = 0; i < V::COUNT; ++i) sum[i] += more[i];
        }
        if (a.residual) {
            V::up(residual, more);
            for (int i = 0; i < V::COUNT; ++i) sum[i] += more[i];
        }
        static_cast<Words4*>(a.y)[at] = V::down(sum);
    }
    __syncthreads();  // all threads have read the slot's number
    if (threadIdx.x == 0) a.slots[block] = slot == SLOTS - 1 ? 0 : slot + 1;
}
