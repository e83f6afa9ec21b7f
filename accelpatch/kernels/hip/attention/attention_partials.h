// Partial softmax states (m, l, acc) that blocks exchange, and their reduction as a binary tree over the numbers of KV
// splits. A subtree is FAN_IN KV splits, counted from the row's first slot; a tree is FAN_IN subtrees; trees are added
// one after another. A partial state covers 1, 2, 4 or 8 KV splits, as many of a subtree as its block has alone; in a
// head that the next block continues, any power of two of a tree. Readers need no counter: the words of a partial state
// are zero until they are stored, and the reader resets them to zero.
#pragma once
#include "attention.h"

constexpr float LEAST = -3.4e38f;  // the least value of a highest score: the difference of two infinities would be NaN

// A partial softmax state of four columns: the highest score m, the sum l of exp2(score - m), and the weighted sums
// acc.
struct Part {
    float highest = LEAST, total = 0.f, sums[4] = {0.f, 0.f, 0.f, 0.f};
    // Merges the state of the splits that follow. An empty state changes nothing.
    DEVICE void merge(const Part& other) {
        const float most = fmaxf(highest, other.highest), before = fast_exp2(highest - most),
                    factor = fast_exp2(other.highest - most);
        highest = most, total = fmaf(factor, other.total, total * before);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(factor, other.sums[i], sums[i] * before);
    }
};

// The partial states of one query's KV splits: [KV split][piece][PARTIAL_HEAD + PIECE] floats.
template <int WIDE> struct Partials {
    float* memory;
    DEVICE float* at(int split, int column) const {
        return memory + (split * (WIDE / PIECE) + column / PIECE) * PIECE_FLOATS;
    }
    // A stored word is never zero: zero is stored as -0.
    static DEVICE uint32_t word(float v) { return v == 0.f ? 0x80000000u : float_to_bits(v); }
    // Stores four columns of the partial state of `splits` KV splits, by relaxed stores. Each piece begins with the
    // highest score, the sum of weights and the number of splits.
    DEVICE void keep(int split, int splits, int column, const Part& part) const {
        float* to = at(split, column);
        if (column % PIECE == 0) store_relaxed16(to, {word(part.highest), word(part.total), uint32_t(splits), 0});
        store_relaxed16(to + PARTIAL_HEAD + column % PIECE,
            {word(part.sums[0]), word(part.sums[1]), word(part.sums[2]), word(part.sums[3])});
    }
    // Four columns of a partial state as they were loaded; there: whether all words had been stored.
    struct Seen {
        Words4 head, sums;
        bool there;
        DEVICE Part part() const {
            Part p;
            if (there)
                p = {bits_to_float(head.x), bits_to_float(head.y),
                    {bits_to_float(sums.x), bits_to_float(sums.y), bits_to_float(sums.z), bits_to_float(sums.w)}};
            return p;
        }
    };
    DEVICE Seen look(int split, int column, bool asked) const {
        Seen s = {{0, 0, 0, 0}, {0, 0, 0, 0}, false};
        if (asked)
            s.head = load_relaxed16(at(split, column)),
            s.sums = load_relaxed16(at(split, column) + PARTIAL_HEAD + column % PIECE);
        s.there = s.head.x && s.head.y && s.head.z && s.sums.x && s.sums.y && s.sums.z && s.sums.w;
        return s;
    }
    // Resets a partial state to zero. Precondition: all lanes of the warp have loaded what they wait for.
    DEVICE void forget(const Seen& s, int split, int column) const {
        if (!s.there) return;
        if (column % PIECE == 0) store_relaxed16(at(split, column), {0, 0, 0, 0});
        store_relaxed16(at(split, column) + PARTIAL_HEAD + column % PIECE, {0, 0, 0, 0});
    }
    // A partial state, once all lanes' columns that are asked for have come.
    DEVICE Seen await(int split, int column, bool asked) const {
        Seen s;
        for (int looks = 0; s = look(split, column, asked), lane_vote(asked && !s.there);) spin(looks);
        forget(s, split, column);
        return s;
    }
};

// A warp adds up a piece's columns of all partial states from KV split `first` to `last`. Four lanes have four columns
// each, and of every FAN_IN KV splits or subtrees one: their group. (Of 64 lanes the upper half does what the lower
// half does.)
template <int WIDE> struct Gatherer {
    const Partials<WIDE>& partials;
    const int first, last, column;
    const bool mine;  // whether a head has the column
    int looks = 0;

    DEVICE Gatherer(const Partials<WIDE>& partials, int first, int last, int piece, int size)
        : partials(partials),
          first(first),
          last(last),
          column(piece * PIECE + lane_id() % 4 * 4),
          mine(column < size) {}
    static DEVICE int group() { return lane_id() / 4 % FAN_IN; }

    using Seen = typename Partials<WIDE>::Seen;
    DEVICE Seen look(int split) const { return partials.look(split, column, mine && split <= last); }
    DEVICE void forget(const Seen& s, int split) const { partials.forget(s, split, column); }
    // All groups' parts as a tree, of several trees at once; the first group has them right.
    template <int TREES> static DEVICE void add_groups(Part (&parts)[TREES]) {
#pragma unroll
        for (int step = 4; step < 4 * FAN_IN; step *= 2)
#pragma unroll
            for (Part& part : parts) {
                Part other;
                other.highest = lane_xor(part.highest, step), other.total = lane_xor(part.total, step);
#pragma unroll
                for (int i = 0; i < 4; ++i) other.sums[i] = lane_xor(part.sums[i], step);
                part.merge(other);
            }
    }
    // Subtrees of which several blocks may have KV splits, or none from `last` on: a group has a KV split of each, once
    // all that are due are there or a partial state before them stands for them.
    template <int SUBTREES> DEVICE void splits(const int (&subtrees)[SUBTREES], Part (&parts)[SUBTREES]) {
        Seen seen[SUBTREES];
        for (bool due[SUBTREES];; spin(looks)) {
            bool any = false;
#pragma unroll
            for (int n = 0; n < SUBTREES; ++n) {
                const int split = subtrees[n] * FAN_IN + group();
                seen[n] = look(split), due[n] = mine && split >= first && split <= last && !seen[n].there,
                any = any || due[n];
            }
            if (!lane_vote(any)) break;
            any = false;
#pragma unroll
            for (int n = 0; n < SUBTREES; ++n) {
#pragma unroll
                for (int splits = 2; splits <= FAN_IN; splits *= 2) {
                    const uint32_t votes = lane_vote(seen[n].there && int(seen[n].head.z) >= splits);
                    if (group() % splits && votes >> ((group() & -splits) * 4 + lane_id() % 4) & 1) due[n] = false;
                }
                any = any || due[n];
            }
            if (!lane_vote(any)) break;
        }
#pragma unroll
        for (int n = 0; n < SUBTREES; ++n) forget(seen[n], subtrees[n] * FAN_IN + group()), parts[n] = seen[n].part();
        add_groups(parts);
    }
    // A tree of which most subtrees have one partial state or two: a group has one subtree. Gives those that it has not
    // taken, a bit each.
    DEVICE uint32_t subtrees(int tree, Part& into) {
        const int split = (tree * FAN_IN + group()) * FAN_IN, half = split + FAN_IN / 2;
        Seen low, high;
        bool complete = false, rest = false;
        for (bool all = false; !all;) {
            low = look(split), high = look(half);
            const int splits = low.there ? int(low.head.z) : 0;
            const bool some = mine && split <= last, other = splits == FAN_IN / 2 && half <= last;
            complete = split >= first &&
                       (splits == FAN_IN ||
                           (splits == FAN_IN / 2 && (half > last || (high.there && int(high.head.z) == FAN_IN / 2))));
            rest = some && !complete && (split < first || (splits && !other) || (other && high.there));
            all = lane_vote(some && !complete && !rest) == 0;
            if (!all) spin(looks);
        }
        warp_sync();
        if (complete) {
            forget(low, split), into = low.part();
            if (int(low.head.z) < FAN_IN) forget(high, half), into.merge(high.part());
        }
        const uint32_t votes = lane_vote(rest);
        uint32_t left = 0;
        if (votes)
#pragma unroll
            for (int g = 0; g < FAN_IN; ++g) left |= (votes >> 4 * g & 1u) << g;
        return left;
    }
    // halves: whether blocks have at least half a subtree each, as a rule.
    DEVICE Part all(bool halves) {
        const int begin = first / FAN_IN, end = last / FAN_IN;
        const bool few = end - begin < 2;  // subtrees: they need no tree of their own
        Part sum;
#pragma unroll 1
        for (int tree = begin / FAN_IN; tree * FAN_IN <= end; ++tree) {
            Part part[1];
            const int from = max(tree * FAN_IN, begin), to = min(tree * FAN_IN + FAN_IN - 1, end);
            uint32_t left = halves && !few ? subtrees(tree, part[0]) : (2u << to % FAN_IN) - (1u << from % FAN_IN);
#pragma unroll 1
            while (left) {
                Part parts[2];
                int two[2] = {begin, end > begin ? end : end + 1};  // or one and none
                if (!few)
#pragma unroll
                    for (int& subtree : two)
                        subtree = left ? tree * FAN_IN + lowest_bit(left) : end + 1, left &= left - 1;
                splits(two, parts);
                if (few) {
                    parts[0].merge(parts[1]);
                    return parts[0];
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {  // to the subtree's own group
                    const int lane = lane_id() % 4;
                    Part& one = parts[n];
                    one.highest = from_lane(one.highest, lane), one.total = from_lane(one.total, lane);
#pragma unroll
                    for (int i = 0; i < 4; ++i) one.sums[i] = from_lane(one.sums[i], lane);
                    if (two[n] % FAN_IN == group() && two[n] <= end) part[0] = one;
                }
            }
            add_groups(part);
            sum.merge(part[0]);
        }
        return sum;
    }
};
