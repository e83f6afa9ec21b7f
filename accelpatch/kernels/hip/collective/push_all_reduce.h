// One-shot all-reduce of small messages: y = sum over ranks of x, plus a residual, in one launch on each rank.
//
// Each thread has one vector of 16 bytes. It stores the vector into the memory of all other ranks, waits until theirs
// have arrived in its own, and adds them up in float32 in the order of the ranks, so that all ranks get the same bits.
// Words that have not arrived yet are SENTINEL_WORD, which no rank sends: there are no flags, and a message is
// one transfer over the link. (LL128 of NCCL and "Lamport" of TensorRT-LLM are of this kind.)
//
// The memory has three slots, which launches use in turn. Launch i writes into its slot, and resets the slot of launch
// i - 1, which it fills with sentinels. Launch i + 3 writes into the slot of launch i again, after that slot has been
// reset: a rank starts launch i + 3 after its launch i + 2 has ended, which has received the messages of all ranks;
// each rank sent this message after its own launch i + 1 had ended, which reset the slot. Each block counts its slots
// by itself, so that this holds for each block, and messages of different sizes may follow each other.
#pragma once
#include "arch/host.h"
#include "arch/peer_access.h"

constexpr int MOST_RANKS = 8, SLOTS = 3;
constexpr int VECTORS = 128, MOST_BLOCKS = 128;  // vectors of a block, one for each thread; blocks of a launch
constexpr uint32_t SENTINEL_WORD = 0xffffffffu;  // a NaN in each dtype; sendable() replaces it in messages

struct PushArgs {
    void* memory[MOST_RANKS];  // of each rank: [SLOTS][world][MOST_BLOCKS * VECTORS] vectors
    int32_t* slot_numbers;     // [MOST_BLOCKS]: the slot of each block's next launch, this rank's; zeros at first
    int32_t* failed;           // set to 1 where words have not arrived after `patience` loads
    const void* x;             // [vectors]
    const void* residual;      // [vectors] or null
    void* y;                   // [vectors]; may be x
    int64_t vectors;
    int32_t rank, world;
    int32_t patience;  // how often a thread loads the words of the other ranks; 0: until they have arrived
};

struct F32 {};  // a third dtype, in addition to Bf16 and F16
// COUNT values in a vector of 16 bytes, to and from float32.
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
// Replaces SENTINEL_WORD by another NaN.
DEVICE uint32_t sendable(uint32_t word) { return word == SENTINEL_WORD ? 0x7fff7fffu : word; }
DEVICE Words4 sendable(const Words4& v) { return {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)}; }

// The address of vector `at` from rank `from` in a rank's memory.
DEVICE Words4* place(const PushArgs& a, void* memory, int slot, int from, int at) {
    return static_cast<Words4*>(memory) + (int64_t(slot) * a.world + from) * (MOST_BLOCKS * VECTORS) + at;
}

// The whole of a block. RANKS: at least `world`. Precondition: all threads call it, and all ranks make launches of the
// same sizes in the same order. A barrier comes before the slot number is stored.
template <class T, int RANKS> DEVICE void push_and_add(const PushArgs& a, int block) {
    using V = Vector<T>;
    const int at = block * VECTORS + int(threadIdx.x), rank = a.rank;
    const bool there = at < a.vectors;
    grid_wait();     // all earlier launches have ended; the next launch relies on that too, although it starts early
    grid_release();  // the next kernel may prefetch its weights while this one waits
    const int slot = int(load_activation4(a.slot_numbers + block)), previous = slot == 0 ? SLOTS - 1 : slot - 1;
    void* own = a.memory[0];
#pragma unroll
    for (int r = 1; r < RANKS; ++r)
        own = r == rank ? a.memory[r] : own;  // a.memory[rank] would copy the array to local memory
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
        if (r < a.world && r != rank) store_system16(place(a, own, previous, r, at), sentinels);
    if (there) {
        const Words4 residual = load_activation16(static_cast<const Words4*>(a.residual) + at, a.residual != nullptr);
#pragma unroll 1
        for (int looks = 1;; ++looks) {
            bool missing = false;
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                parts[r] = r < a.world && r != rank ? load_system16(place(a, own, slot, r, at)) : mine;
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
    __syncthreads();  // all threads have read the slot number
    if (threadIdx.x == 0) a.slot_numbers[block] = slot == SLOTS - 1 ? 0 : slot + 1;
}
