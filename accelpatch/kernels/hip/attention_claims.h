// Work that blocks claim. Memory serves some processors faster than others, and rows are of many lengths: where blocks have many spans, some
// of each head are nobody's share at first, and a block that has ended its own claims them, a unit at a time. Who has a span changes no bit.
#pragma once
#include "attention.h"

constexpr int UNIT = NODE / 2, LEAST_DEALT = 3 * NODE;  // spans of a unit; of a block, from which on there are units

struct ClaimingShare : Share {
    int each = 0, units = 0;  // of a head: spans that a part has at first, and units behind all parts
    volatile int* claimed;    // of shared memory: a unit's number, there before anything asks for what comes behind the share
    DEVICE ClaimingShare(const Geometry& all, const AttentionArgs& a) : Share(all, a), claimed(all.starts + a.rows) {
        const int blocks = int(gridDim.x), block = int(blockIdx.x), total = all.heads * all.spans;
        if (blocks < all.heads || total < LEAST_DEALT * blocks) return;
        parts = blocks / all.heads, part = block % parts, before = min(block, all.heads * parts), busy = all.heads * parts;
        each = int(int64_t(total) * 9 / (10 * blocks)) / NODE * NODE, units = (all.spans - each * parts + UNIT - 1) / UNIT;
        at = block / parts * all.spans + part * each, end = block < busy ? at + each : at;
    }
    DEVICE bool next(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        if (Share::next(s, a, plan, all)) return true;
        return units && *claimed < all.heads * units && unit(s, *claimed, a, plan, all);
    }
    DEVICE bool more() const { return at < end || units; }
    // Spans of a head; false if its row has none of them.
    DEVICE bool some(Segment& s, int head, int skipped, int taken, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        Share other = *this;
        other.at = head * all.spans + skipped, other.end = other.at + taken;
        return other.next(s, a, plan, all);
    }
    DEVICE bool unit(Segment& s, int number, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        const int head = number / units, skipped = each * parts + (number - head * units) * UNIT;
        return some(s, head, skipped, min(UNIT, all.spans - skipped), a, plan, all);
    }
    // All threads call it, the last time for a number that no unit has; behind a barrier they may read it.
    DEVICE void claim(const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        grid_wait();  // else a block of the launch before may still claim
        if (threadIdx.x) return;
        const int count = all.heads * units;
        Segment unused;
        int number;
        do number = next_number(a.finished, count + int(gridDim.x));
        while (number < count && !unit(unused, number, a, plan, all));
        *claimed = number;
    }
    // Claims before a block's first segment, if it has no share; whether there is one.
    DEVICE bool begin(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        if (Share::next(s, a, plan, all)) return true;
        if (!units) return false;
        claim(a, plan, all);
        __syncthreads();
        return next(s, a, plan, all);
    }
    // Claims what comes behind a segment, at its last span but one.
    DEVICE void follow(const Segment& s, int i, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        if (!units || i != max(s.count - 2, 0)) return;
        claim(a, plan, all);
        if (s.count == 1) __syncthreads();
    }
    // The head that a block adds up some columns of, whoever has claimed what of it; false if there is none, or one block has had all of it.
    DEVICE bool gathers(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        return int(blockIdx.x) < busy && some(s, int(blockIdx.x) / parts, 0, each, a, plan, all) && !s.alone(plan.levels);
    }
};
template <bool CLAIMS> struct ShareOf { using Type = Share; };
template <> struct ShareOf<true> { using Type = ClaimingShare; };
