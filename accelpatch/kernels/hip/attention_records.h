// What blocks hand each other of a query: results of spans, added up as a binary tree over their numbers. A node is NODE spans, counted from
// the row's first slot, a bunch NODE nodes; bunches follow each other. A record stands for 1, 2, 4 or 8 spans: as many of a node as its
// block has alone; of a head that the next block goes on with, for any power of two of a bunch. Who reads needs no counter: a record's
// words are zero until they are written, and zero again once they are read.
#pragma once
#include "attention.h"

constexpr float LEAST = -3.4e38f;  // as low as a highest score goes: infinities would have no difference

// A highest score, the sum of weights against it, and weighted sums of four columns.
struct Part {
    float highest = LEAST, total = 0.f, sums[4] = {0.f, 0.f, 0.f, 0.f};
    // Takes in what comes behind it; of nothing, nothing changes.
    DEVICE void take(const Part& other) {
        const float most = fmaxf(highest, other.highest), before = fast_exp2(highest - most), factor = fast_exp2(other.highest - most);
        highest = most, total = fmaf(factor, other.total, total * before);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(factor, other.sums[i], sums[i] * before);
    }
};

// The records of one query's spans: [span][piece][RECORD_HEAD + PIECE] floats.
template <int WIDE> struct Records {
    float* memory;
    DEVICE float* at(int span, int column) const { return memory + (span * (WIDE / PIECE) + column / PIECE) * PIECE_FLOATS; }
    // A word that has been handed over is not zero, nor is what stands for a zero.
    static DEVICE uint32_t word(float v) { return v == 0.f ? 0x80000000u : float_to_bits(v); }
    // Four columns of a record of so many spans; before a piece stand the highest score, the sum of weights and how many spans there are.
    DEVICE void keep(int span, int spans, int column, const Part& part) const {
        float* to = at(span, column);
        if (column % PIECE == 0) hand16(to, {word(part.highest), word(part.total), uint32_t(spans), 0});
        hand16(to + RECORD_HEAD + column % PIECE, {word(part.sums[0]), word(part.sums[1]), word(part.sums[2]), word(part.sums[3])});
    }
    // What has come of four columns.
    struct Seen {
        Words4 head, sums;
        bool there;
        DEVICE Part part() const {
            Part p;
            if (there) p = {bits_to_float(head.x), bits_to_float(head.y), {bits_to_float(sums.x), bits_to_float(sums.y), bits_to_float(sums.z), bits_to_float(sums.w)}};
            return p;
        }
    };
    DEVICE Seen look(int span, int column, bool asked) const {
        Seen s = {{0, 0, 0, 0}, {0, 0, 0, 0}, false};
        if (asked) s.head = handed16(at(span, column)), s.sums = handed16(at(span, column) + RECORD_HEAD + column % PIECE);
        s.there = s.head.x && s.head.y && s.head.z && s.sums.x && s.sums.y && s.sums.z && s.sums.w;
        return s;
    }
    // Once all lanes have seen what they wait for.
    DEVICE void forget(const Seen& s, int span, int column) const {
        if (!s.there) return;
        if (column % PIECE == 0) hand16(at(span, column), {0, 0, 0, 0});
        hand16(at(span, column) + RECORD_HEAD + column % PIECE, {0, 0, 0, 0});
    }
    // A record, once all lanes' columns that are asked for have come.
    DEVICE Seen await(int span, int column, bool asked) const {
        Seen s;
        for (int looks = 0; s = look(span, column, asked), lane_vote(asked && !s.there);) spin(looks);
        forget(s, span, column);
        return s;
    }
};

// A wave adds up a piece's columns of all records from span `first` to `last`. Four lanes have four columns each, and of every NODE
// spans or nodes one: their group. (Of 64 lanes the upper half does what the lower half does.)
template <int WIDE> struct Gatherer {
    const Records<WIDE>& records;
    const int first, last, column;
    const bool mine;  // whether a head has the column
    int looks = 0;

    DEVICE Gatherer(const Records<WIDE>& records, int first, int last, int piece, int size)
        : records(records), first(first), last(last), column(piece * PIECE + lane_id() % 4 * 4), mine(column < size) {}
    static DEVICE int group() { return lane_id() / 4 % NODE; }

    using Seen = typename Records<WIDE>::Seen;
    DEVICE Seen look(int span) const { return records.look(span, column, mine && span <= last); }
    DEVICE void forget(const Seen& s, int span) const { records.forget(s, span, column); }
    // All groups' parts as a tree, of several trees at once; the first group has them right.
    template <int TREES> static DEVICE void add_groups(Part (&parts)[TREES]) {
#pragma unroll
        for (int step = 4; step < 4 * NODE; step *= 2)
#pragma unroll
            for (Part& part : parts) {
                Part other;
                other.highest = lane_xor(part.highest, step), other.total = lane_xor(part.total, step);
#pragma unroll
                for (int i = 0; i < 4; ++i) other.sums[i] = lane_xor(part.sums[i], step);
                part.take(other);
            }
    }
    // Nodes of which several blocks may have spans, or none from `last` on: a group has a span of each, once all that are due are there or
    // a record before them stands for them.
    template <int NODES> DEVICE void spans(const int (&nodes)[NODES], Part (&parts)[NODES]) {
        Seen seen[NODES];
        for (bool due[NODES];; spin(looks)) {
            bool any = false;
#pragma unroll
            for (int n = 0; n < NODES; ++n) {
                const int span = nodes[n] * NODE + group();
                seen[n] = look(span), due[n] = mine && span >= first && span <= last && !seen[n].there, any = any || due[n];
            }
            if (!lane_vote(any)) break;
            any = false;
#pragma unroll
            for (int n = 0; n < NODES; ++n) {
#pragma unroll
                for (int spans = 2; spans <= NODE; spans *= 2) {
                    const uint32_t votes = lane_vote(seen[n].there && int(seen[n].head.z) >= spans);
                    if (group() % spans && votes >> ((group() & -spans) * 4 + lane_id() % 4) & 1) due[n] = false;
                }
                any = any || due[n];
            }
            if (!lane_vote(any)) break;
        }
#pragma unroll
        for (int n = 0; n < NODES; ++n) forget(seen[n], nodes[n] * NODE + group()), parts[n] = seen[n].part();
        add_groups(parts);
    }
    // A bunch of which most nodes have one record or two: a group has one node. Gives those that it has not taken, a bit each.
    DEVICE uint32_t nodes(int bunch, Part& into) {
        const int span = (bunch * NODE + group()) * NODE, half = span + NODE / 2;
        Seen low, high;
        bool whole = false, rest = false;
        for (bool all = false; !all;) {
            low = look(span), high = look(half);
            const int spans = low.there ? int(low.head.z) : 0;
            const bool some = mine && span <= last, other = spans == NODE / 2 && half <= last;
            whole = span >= first && (spans == NODE || (spans == NODE / 2 && (half > last || (high.there && int(high.head.z) == NODE / 2))));
            rest = some && !whole && (span < first || (spans && !other) || (other && high.there));
            all = lane_vote(some && !whole && !rest) == 0;
            if (!all) spin(looks);
        }
        wave_sync();
        if (whole) {
            forget(low, span), into = low.part();
            if (int(low.head.z) < NODE) forget(high, half), into.take(high.part());
        }
        const uint32_t votes = lane_vote(rest);
        uint32_t left = 0;
        if (votes)
#pragma unroll
            for (int g = 0; g < NODE; ++g) left |= (votes >> 4 * g & 1u) << g;
        return left;
    }
    // halves: whether blocks have at least half a node each, as a rule.
    DEVICE Part all(bool halves) {
        const int begin = first / NODE, end = last / NODE;
        const bool few = end - begin < 2;  // nodes: they need no tree of their own
        Part sum;
#pragma unroll 1
        for (int bunch = begin / NODE; bunch * NODE <= end; ++bunch) {
            Part part[1];
            const int from = max(bunch * NODE, begin), to = min(bunch * NODE + NODE - 1, end);
            uint32_t left = halves && !few ? nodes(bunch, part[0]) : (2u << to % NODE) - (1u << from % NODE);
#pragma unroll 1
            while (left) {
                Part parts[2];
                int two[2] = {begin, end > begin ? end : end + 1};  // or one and none
                if (!few)
#pragma unroll
                    for (int& node : two) node = left ? bunch * NODE + lowest_bit(left) : end + 1, left &= left - 1;
                spans(two, parts);
                if (few) {
                    parts[0].take(parts[1]);
                    return parts[0];
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {  // to the node's own group
                    const int lane = lane_id() % 4;
                    Part& one = parts[n];
                    one.highest = from_lane(one.highest, lane), one.total = from_lane(one.total, lane);
#pragma unroll
                    for (int i = 0; i < 4; ++i) one.sums[i] = from_lane(one.sums[i], lane);
                    if (two[n] % NODE == group() && two[n] <= end) part[0] = one;
                }
            }
            add_groups(part);
            sum.take(part[0]);
        }
        return sum;
    }
};
