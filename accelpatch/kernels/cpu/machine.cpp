// What the machine can do at most, and a hint to its memory manager.
#include <sys/mman.h>

#include <chrono>

#include "accelpatch_cpu.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kAhead = 8192;  // as the products read: without prefetching it is not the machine's limit

struct Reading {
    const char* data;
    int64_t bytes;
    int64_t found[AP_MAX_THREADS * 8];
};

void read_job(void* argument, ThreadPool* pool, int self) {
    auto& r = *static_cast<Reading*>(argument);
    typedef int64_t wide __attribute__((vector_size(64), aligned(1)));
    const int64_t begin = r.bytes / 4096 * self / pool_count(pool) * 4096,
                  end = r.bytes / 4096 * (self + 1) / pool_count(pool) * 4096;
    wide all[4] = {};
    for (int64_t i = begin; i < end; i += 256) {
        for (int j = 0; j < 4; j++) __builtin_prefetch(r.data + i + 64 * j + kAhead);
        for (int j = 0; j < 4; j++) all[j] ^= *reinterpret_cast<const wide*>(r.data + i + 64 * j);
    }
    const wide one = all[0] ^ all[1] ^ all[2] ^ all[3];
    r.found[self * 8] = one[0] ^ one[1] ^ one[2] ^ one[3] ^ one[4] ^ one[5] ^ one[6] ^ one[7];
}

}  // namespace

extern "C" void ap_advise_large_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

extern "C" double ap_read_limit(const void* data, int64_t bytes, int repeats, int threads) {
    Reading reading = {static_cast<const char*>(data), bytes, {}};
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        pool_run(threads, read_job, &reading, POOL_GUEST);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        const double rate = static_cast<double>(bytes / 4096 * 4096) / seconds / 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}
