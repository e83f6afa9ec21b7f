// Dynamic scheduling, over the static partition of attention.h. Memory serves some SMs faster than others, and rows are
// of many lengths: where blocks have many KV splits, some of each head belong to no block at first: a block that has
// ended its own partition fetches them, an item at a time. Who has a KV split changes no bit.
#pragma once
#include "attention.h"

// KV splits of an item; and how many a block must have, or there are no items.
constexpr int ITEM_SPLITS = FAN_IN / 2, LEAST_DYNAMIC = 3 * FAN_IN;

struct DynamicSchedule : StaticPartition {
    static constexpr int MOST_STAGES = 4;
    int each = 0, items = 0;  // of a head: KV splits that a part has at first, and items behind all parts
    // Of shared memory: an item's number, there before anything asks for what comes behind the partition.
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
    // KV splits of a head; false if its row has none of them.
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
    // All threads call it, the last time for a number that no item has; behind a barrier they may read it.
    DEVICE void fetch_item(const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        grid_wait();  // else a block of the launch before may still fetch one
        if (threadIdx.x) return;
        const int count = all.heads * items;
        Segment unused;
        int number;
        do number = next_number(a.finished, count + int(gridDim.x));
        while (number < count && !item(unused, number, a, plan, all));
        *next_item = number;
    }
    // Fetches an item before a block's first segment, if its partition is empty; whether there is one.
    DEVICE bool begin(Segment& s, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) {
        if (StaticPartition::next(s, a, plan, all)) return true;
        if (!items) return false;
        fetch_item(a, plan, all);
        __syncthreads();
        return next(s, a, plan, all);
    }
    // Fetches what comes behind a segment, at its last KV split but one.
    DEVICE void follow(
        const Segment& s, int i, const AttentionArgs& a, const AttentionPlan& plan, const Geometry& all) const {
        if (!items || i != max(s.count - 2, 0)) return;
        fetch_item(a, plan, all);
        if (s.count == 1) __syncthreads();
    }
    // The head that a block adds up some columns of, whichever blocks had it; false if there is none, or one block has
    // had all of it.
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
