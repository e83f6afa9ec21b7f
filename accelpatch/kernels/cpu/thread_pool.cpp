// A pool of threads that spin for a while between calls, then sleep; made again in the child of a fork.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "accelpatch_cpu.h"

struct ThreadPool {
    // One cache line a thread: its partition's cursor (two, used alternately: a thread clears the one that nobody looks
    // at) and its phase.
    struct alignas(64) Member {
        std::atomic<int64_t> cursor[2];
        uint32_t epoch;
    };
    alignas(64) std::atomic<uint32_t> arrived{0};
    int count = 1;
    Member member[AP_MAX_THREADS];
};

namespace {

constexpr int64_t kPatience = 1000;  // microseconds that a worker spins for the next step
constexpr int64_t kPieces = 8;       // of a thread's share: few cost little, enough let others help a late thread
constexpr int kPauses = 2000;        // then others may have the core: more threads than cores must not stall

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Done> void spin_until(Done done) {
    for (int i = 0; !done(); i++) {
        if (i < kPauses) pause();
        else sched_yield();
    }
}

struct Workers {
    std::mutex owner;
    ThreadPool pool;
    std::atomic<uint64_t> ticket{0};  // generation * 256 + count: one word, so that a late worker never mixes two calls
    std::atomic<int> pending{0};
    std::atomic<int64_t> patience{0};  // microseconds that workers spin after the call
    Job job = nullptr;
    void* argument = nullptr;
    int hired = 0;
    std::mutex bed;
    std::condition_variable wake;
    int asleep = 0;
};

std::atomic<Workers*> current{nullptr};

uint64_t next_ticket(Workers* workers, uint64_t seen) {
    const auto start = std::chrono::steady_clock::now();
    const auto patience = std::chrono::microseconds(workers->patience.load(std::memory_order_relaxed));
    for (int i = 0;; i++) {
        uint64_t now = workers->ticket.load(std::memory_order_acquire);
        if (now != seen) return now;
        if (i < kPauses) pause();
        else sched_yield();
        if (i % 64 == 63 && std::chrono::steady_clock::now() - start > patience) break;
    }
    std::unique_lock<std::mutex> lock(workers->bed);
    workers->asleep++;
    workers->wake.wait(lock, [&] { return workers->ticket.load(std::memory_order_acquire) != seen; });
    workers->asleep--;
    return workers->ticket.load(std::memory_order_acquire);
}

void work(Workers* workers, int self, uint64_t seen) {
    for (;;) {
        seen = next_ticket(workers, seen);
        if (self >= static_cast<int>(seen % 256)) continue;
        workers->job(workers->argument, &workers->pool, self);
        workers->pending.fetch_sub(1, std::memory_order_release);
    }
}

// The program's OpenMP runtime, by the interface that GCC's compiled code uses; LLVM's and Intel's runtimes have it
// too.
struct Team {
    std::atomic<void (*)(void (*)(void*), void*, unsigned, unsigned)> parallel{nullptr};
    std::atomic<int (*)()> number{nullptr}, count{nullptr};
} team;

// After a fork the child has a copy of the memory, but none of the other threads, and perhaps a lock that one of them
// had. It starts anew, with threads of our own: the OpenMP runtime would wait for ever for those that it had.
void forget() {
    current.store(nullptr);
    team.parallel.store(nullptr);
}

void forget_after_fork() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget);
    (void)registered;
}

Workers* own_workers() {
    Workers* here = current.load(std::memory_order_acquire);
    if (here) return here;
    forget_after_fork();
    Workers* made = new Workers;
    if (current.compare_exchange_strong(here, made)) return made;
    delete made;
    return here;
}

void reset(ThreadPool& pool, int count) {
    pool.count = count;
    pool.arrived.store(0, std::memory_order_relaxed);
    for (int i = 0; i < count; i++) {
        for (auto& cursor : pool.member[i].cursor) cursor.store(0, std::memory_order_relaxed);
        pool.member[i].epoch = 0;
    }
}

// As many workers as the system gives: fewer than asked for is slower, not wrong.
int hire(Workers* workers, int count) {
    try {
        for (; workers->hired < count - 1; workers->hired++)
            std::thread(work, workers, workers->hired + 1, workers->ticket.load(std::memory_order_relaxed)).detach();
    } catch (const std::system_error&) {
        return workers->hired + 1;
    }
    return count;
}

void publish(Workers* workers, int count) {
    uint64_t generation = workers->ticket.load(std::memory_order_relaxed) / 256 + 1;
    workers->pending.store(count - 1, std::memory_order_relaxed);
    bool sleepers;
    {
        std::lock_guard<std::mutex> lock(workers->bed);
        workers->ticket.store(generation * 256 + static_cast<uint64_t>(count), std::memory_order_release);
        sleepers = workers->asleep > 0;
    }
    if (sleepers) workers->wake.notify_all();
}

struct Guest {
    ThreadPool pool;
    Job job;
    void* argument;
    std::atomic<bool> ready{false};
};

// How many threads came is known only inside.
void guest(void* data) {
    auto* g = static_cast<Guest*>(data);
    const int self = team.number.load()();
    if (self == 0) {
        reset(g->pool, team.count.load()());
        g->ready.store(true, std::memory_order_release);
    }
    spin_until([&] { return g->ready.load(std::memory_order_acquire); });
    g->job(g->argument, &g->pool, self);
}

void run_alone(Job job, void* argument) {
    ThreadPool alone;
    reset(alone, 1);
    job(argument, &alone, 0);
}

}  // namespace

void ap_use_team(void* parallel, void* number, void* count) {
    forget_after_fork();
    team.number.store(reinterpret_cast<int (*)()>(number));
    team.count.store(reinterpret_cast<int (*)()>(count));
    team.parallel.store(reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel));
}

void pool_run(int count, Job job, void* argument, PoolKind kind) {
    count = std::clamp<int>(count, 1, AP_MAX_THREADS);
    if (count == 1) return run_alone(job, argument);
    if (auto* parallel = team.parallel.load(); parallel && kind == POOL_GUEST) {
        Guest g;
        g.job = job;
        g.argument = argument;
        return parallel(guest, &g, static_cast<unsigned>(count), 0);
    }
    Workers* here = own_workers();
    if (!here->owner.try_lock()) return run_alone(job, argument);
    std::lock_guard<std::mutex> lock(here->owner, std::adopt_lock);
    count = hire(here, count);
    reset(here->pool, count);
    here->job = job;
    here->argument = argument;
    here->patience.store(kind == POOL_DECODING ? kPatience : 0, std::memory_order_relaxed);
    publish(here, count);
    job(argument, &here->pool, 0);
    spin_until([&] { return here->pending.load(std::memory_order_acquire) == 0; });
}

int pool_count(const ThreadPool* pool) { return pool->count; }

void pool_wait(ThreadPool* pool, int self) {
    auto& me = pool->member[self];
    me.epoch++;
    // The next phase's cursor was last used two waits ago: everybody has passed the wait that ended that phase.
    me.cursor[me.epoch % 2].store(0, std::memory_order_relaxed);
    const uint32_t target = me.epoch * static_cast<uint32_t>(pool->count);
    if (pool->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == target) return;
    spin_until([&] { return static_cast<int32_t>(pool->arrived.load(std::memory_order_acquire) - target) >= 0; });
}

int64_t pool_partition(const ThreadPool* pool, int self, int64_t items) { return items * self / pool->count; }

bool pool_advance(ThreadPool* pool, int self, WorkCursor* work) {
    const uint32_t epoch = pool->member[self].epoch % 2;
    for (; work->tried < pool->count; work->tried++) {
        const int whose = (self + work->tried) % pool->count;
        const int64_t begin = pool_partition(pool, whose, work->items),
                      end = pool_partition(pool, whose + 1, work->items);
        const int64_t piece = std::max<int64_t>(1, (end - begin) / kPieces);
        auto& cursor = pool->member[whose].cursor[epoch];
        if (begin + cursor.load(std::memory_order_relaxed) >= end) continue;
        work->next = begin + cursor.fetch_add(piece, std::memory_order_relaxed);
        work->end = std::min(work->next + piece, end);
        if (work->next < end) return true;
    }
    work->next = work->end = 0;
    return false;
}
