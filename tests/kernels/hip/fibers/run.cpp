// The fibers that run a kernel.
#include "portability.h"
#include <cstdio>
#include <ucontext.h>
#include <vector>

Place threadIdx, blockIdx, gridDim;
Fibers fibers;
constexpr int MOST_THREADS = 8 * WAVE, BEYOND = 4096, STACK = 1 << 17;
alignas(128) char shared[233472 + BEYOND];
#if defined(COPIES)
std::deque<std::vector<Copy>> copies[MOST_THREADS];
#endif
namespace {
ucontext_t outside, contexts[MOST_THREADS];
std::vector<char> stacks[MOST_THREADS];
bool ended[MOST_THREADS];
const std::function<void()>* work;

void leave() { const int i = int(threadIdx.x); swapcontext(&contexts[i], &outside); }
void enter() {
    (*work)();
    ended[threadIdx.x] = true;
    if (--fibers.alive && fibers.at_barrier == fibers.alive) fibers.at_barrier = 0, ++fibers.barriers;
    leave();
}
std::vector<int> progress() {
    std::vector<int> all{fibers.alive, fibers.at_barrier, fibers.barriers};
    all.insert(all.end(), fibers.at_meeting, fibers.at_meeting + 32), all.insert(all.end(), fibers.meetings, fibers.meetings + 32);
    for (const Group& one : fibers.groups) all.push_back(one.arrived), all.push_back(one.times);
    return all;
}
void make(int thread) {
    stacks[thread].resize(STACK);
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks[thread].data(), contexts[thread].uc_stack.ss_size = STACK;
    makecontext(&contexts[thread], enter, 0);
    ended[thread] = false;
#if defined(COPIES)
    copies[thread].assign(1, {});
#endif
}
}  // namespace

void run_blocks(int blocks, int threads, int bytes, const std::function<void()>& kernel) {
    work = &kernel, fibers.yield = leave, gridDim.x = unsigned(blocks);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        fibers.alive = threads;
        std::memset(shared, 0xff, sizeof shared);  // not a number
        for (int i = 0; i < threads; ++i) make(i);
        while (fibers.alive) {
            const auto before = progress();
            for (int i = 0; i < threads; ++i)
                if (const int thread = fibers.backwards ? threads - 1 - i : i; !ended[thread]) threadIdx.x = unsigned(thread), swapcontext(&outside, &contexts[thread]);
            if (progress() == before) std::fprintf(stderr, "all threads wait\n"), std::abort();
        }
        for (int i = bytes; i < int(sizeof shared); ++i)
            if (shared[i] != char(0xff)) std::fprintf(stderr, "written past the end of shared memory\n"), std::abort();
    }
}
extern "C" void set_fibers(int processors, int late, int backwards) { fibers.processors = processors, fibers.late = late, fibers.backwards = backwards; }
