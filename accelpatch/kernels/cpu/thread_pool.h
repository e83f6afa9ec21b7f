// The threads of one call: how they wait for each other and share out work. See thread_pool.cpp.
#pragma once
#include <cstdint>

struct ThreadPool;
using Job = void (*)(void* argument, ThreadPool* pool, int self);

// Runs job on `count` threads, the caller's among them, and returns when all have.
// POOL_DECODING: on threads of our own, which then spin some time for the next call; a decode loop comes back within a
// millisecond. Where another call holds them, the caller runs alone (count 1): two callers never wait for each other.
// POOL_GUEST: on the OpenMP threads of the program that we are in (ap_use_team), as torch's own operations are: after
// each of those they spin for a while, and threads of ours would have to fight them for the cores. Where there are
// none: on ours.
enum PoolKind { POOL_DECODING, POOL_GUEST };
void pool_run(int count, Job job, void* argument, PoolKind kind);
int pool_count(const ThreadPool* pool);
// Everyone waits for everyone; what was written before is seen after. Every thread must call it equally often.
void pool_wait(ThreadPool* pool, int self);
// What a thread has before it of the items of a phase (the time between two waits): first its own partition, piece by
// piece, then pieces of other partitions that nobody has begun. Begin one anew in each phase.
struct WorkCursor {
    int64_t items;
    int64_t next = 0, end = 0;  // the piece in hand
    int tried = 0;              // partitions found empty
};

// Takes another piece in hand; false when nothing is left.
bool pool_advance(ThreadPool* pool, int self, WorkCursor* work);

// The next item to do, or -1.
static inline int64_t pool_next(ThreadPool* pool, int self, WorkCursor* work) {
    if (work->next == work->end && !pool_advance(pool, self, work)) return -1;
    return work->next++;
}

// Where a thread's own partition begins.
int64_t pool_partition(const ThreadPool* pool, int self, int64_t items);
