// Dynamic scheduling on top of the static partition of attention.h, since some SMs get less memory bandwidth, and rows
// differ in length. Where blocks have many KV splits, some of each head belong to no block at first. A block that has
// finished its own partition fetches them, one work item at a time. Results do not depend on which block has a KV
// split.
#pragma once
#include "attention.h"

// KV splits of a work item; the least number of KV splits a block for which there are work items.
constexpr int ITEM_SPLITS = FAN_IN / 2, LEAST_DYNAMIC = 3 * FAN_IN;

struct DynamicSchedule : StaticPartition {
    static constexpr int MOST_STAGES = 4;
    int each = 0, items = 0;  // of a head: KV splits of each block's static part, and work items after all parts
    // In shared memory: the number of the item that was fetched, before it is needed.
    volatile int* next_item;
    DEVICE DynamicSchedule(const Geometry& all, const AttentionArgs& a)
        : StaticPartition(all, a),
          next_item(all.slots + a.rows) {
        const int blocks = int(gridDim.x), block = int(blockIdx.x), total = all.heads * all.splits;
        if (blocks < all.heads || total < LEAST_DYNAMIC * blocks) return;
        parts = blocks / all.heads, part = block % parts, before = min(block, all.heads * parts),
        busy = all.heads * parts;
        each = int(int64_t(total) * 9 / (10 * blocks)) / FAN_IN * FAN_IN,
        items = (all.splits - each * parts + ITEM_SPLITS - 1) / ITEM_SPLITS;
        at = block / parts * all.splits + part * each, end = block < busy ? at + each : at;
    }
    DEVICE bool next(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        if (StaticPartition::next(s, a, plan, all)) return true;
        return items && *next_item < all.heads * items && item(s, *next_item, a, plan, all);
    }
    DEVICE bool more() const { return at < end || items; }
    // The segment of `length` KV splits of a head after `skipped` others; false if its row has none of these.
    DEVICE bool part_of(Segment& s, int head, int skipped, int length, const AttentionArgs& a,
        const AttentionPlan& plan, const Geometry& all) const {
        StaticPartition other = *this;
        other.at = head * all.splits + skipped, other.end = other.at + length;
        return other.next(s, a, plan, all);
    }
    DEVICE bool item(
        Segment& s, int number, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        const int head = number / items, skipped = each * parts + (number - head * items) * ITEM_SPLITS;
        return part_of(s, head, skipped, min(ITEM_SPLITS, all.splits - skipped), a, plan, all);
    }
    // Fetches the number of the next item that is not empty, or one past the last. Precondition: all threads of the
    // block call it. The number is visible after a barrier, which must follow.
    DEVICE void fetch_item(const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        grid_wait();  // a block of the launch before might still fetch from this counter
        if (threadIdx.x) return;
        const int count = all.heads * items;
        Segment unused;
        int number;
        do number = next_number(a.finished, count + int(gridDim.x));
        while (number < count && !item(unused, number, a, plan, all));
        *next_item = number;
    }
    // The block's first segment, of its partition or, where that is empty, of an item; false if there is none.
    DEVICE bool begin(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        if (StaticPartition::next(s, a, plan, all)) return true;
        if (!items) return false;
        fetch_item(a, plan, all);
        __syncthreads();
        return next(s, a, plan, all);
    }
    // Fetches the item after a segment while its last KV split but one is computed. Precondition: all threads call it.
    DEVICE void follow(
        const Segment& s, int i, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        if (!items || i != max(s.count - 2, 0)) return;
        fetch_item(a, plan, all);
        if (s.count == 1) __syncthreads();
    }
    // The head of which this block reduces some columns, whichever blocks have computed its splits; false if there is
    // none, or one block has computed all of it.
    DEVICE bool gathers(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        return int(blockIdx.x) < busy && part_of(s, int(blockIdx.x) / parts, 0, each, a, plan, all) &&
               !s.alone(plan.levels);
    }
};
template <bool DYNAMIC> struct ScheduleOf {
    using Type = StaticPartition;
};
template <> struct ScheduleOf<true> {
    using Type = DynamicSchedule;
};
