// Runs a kernel: each emulated thread has a stack of its own (ucontext), and one runs at a time.
#include "arch/portability.h"
#include <csetjmp>
#include <cstdio>
#include <memory>
#include <ucontext.h>
#include <vector>

Place threadIdx, blockIdx, gridDim;
Emulator emulator;
Meeting meeting;
Owed owed;
int most_delay;
unsigned drawn;
int thread, arrived[MOST_CLUSTER * 8 * WARP_SIZE];
constexpr int MOST_THREADS = MOST_CLUSTER * 8 * WARP_SIZE, BEYOND = 4096, STACK = 1 << 17;
alignas(128) char shared[233472 + BEYOND];
#if defined(COPIES)
std::deque<std::vector<Copy>> copies[MOST_THREADS];
#endif
namespace {
jmp_buf scheduler, places[MOST_THREADS];  // swapcontext asks the kernel for the signal mask each time; these do not
std::unique_ptr<char[]> stacks[MOST_THREADS];
std::vector<char> images[MOST_CLUSTER];  // of shared memory, while another block of the cluster runs
Emulator states[MOST_CLUSTER];
bool ended[MOST_THREADS];
char before = char(0xff);  // what shared memory holds: not a number
int unwaited;              // copies that a thread asked for and did not wait for
int held;                  // whose block's shared memory and state are in place
const std::function<void()>* work;

void leave() {
    if (!_setjmp(places[thread])) _longjmp(scheduler, 1);
}
void enter() {
    for (;; leave()) {  // the next kernel's thread of this number begins here
        (*work)();
#if defined(COPIES)
        for (const auto& group : copies[thread]) unwaited += int(group.size());
#endif
        ended[thread] = true;
        if (--emulator.alive && emulator.at_barrier == emulator.alive) emulator.at_barrier = 0, ++emulator.barriers;
    }
}
__attribute__((noinline)) void resume() {  // until it leaves
    if (_setjmp(scheduler)) return;
    if (stacks[thread]) _longjmp(places[thread], 1);
    stacks[thread].reset(new char[STACK]);  // not touched before it is needed
    ucontext_t begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = stacks[thread].get(), begin.uc_stack.ss_size = STACK;
    makecontext(&begin, enter, 0);
    setcontext(&begin);
}
void hold(int rank) {
    if (rank == held) return;
    states[held] = emulator, emulator = states[rank];
    std::memcpy(images[held].data(), shared, images[held].size()),
        std::memcpy(shared, images[rank].data(), images[rank].size());
    held = rank;
}
std::vector<int> progress(int cluster) {
    std::vector<int> all{meeting.arrived, meeting.times, meeting.messages};
    states[held] = emulator;
    for (int rank = 0; rank < cluster; ++rank) {
        const Emulator& one = states[rank];
        all.push_back(one.alive), all.push_back(one.at_barrier), all.push_back(one.barriers);
        all.insert(all.end(), one.at_meeting, one.at_meeting + 32),
            all.insert(all.end(), one.meetings, one.meetings + 32);
        for (const Group& group : one.groups) all.push_back(group.arrived), all.push_back(group.times);
    }
    return all;
}
void renew(int at) {
    ended[at] = false;
#if defined(COPIES)
    copies[at].assign(1, {});
#endif
}
void run_cluster(int first, int cluster, int threads, int bytes) {
    const int all = cluster * threads;
    held = 0, meeting.of = all, meeting.blocks = cluster;
    for (int rank = cluster - 1; rank >= 0; --rank) {
        emulator.alive = threads, states[rank] = emulator;
        images[rank].assign(cluster > 1 ? bytes + BEYOND : 0, before);
    }
    std::memset(shared, before, sizeof shared);
    for (int i = 0; i < all; ++i) renew(i);
    for (bool left = true; left;) {
        const auto then = progress(cluster);
        left = false;
        for (int i = 0; i < all; ++i) {
            thread = emulator.backwards ? all - 1 - i : i;
            if (ended[thread]) continue;
            hold(thread / threads);
            left = true, blockIdx.x = unsigned(first + held), threadIdx.x = unsigned(thread % threads);
            resume();
        }
        if (left && progress(cluster) == then) std::fprintf(stderr, "all threads wait\n"), std::abort();
    }
    for (int rank = 0; rank < cluster; ++rank) {
        hold(rank);
        for (int i = bytes; i < bytes + BEYOND; ++i)
            if (shared[i] != before) std::fprintf(stderr, "written past the end of shared memory\n"), std::abort();
    }
}
}  // namespace

char* in_block(char* here, int rank) { return rank == held ? here : images[rank].data() + (here - shared); }
int last_bytes;
std::vector<Brought> brought;
int zeros;
int handed;
void run_blocks(int blocks, int cluster, int threads, int bytes, const std::function<void()>& kernel) {
    work = &kernel, emulator.yield = leave, gridDim.x = unsigned(blocks), last_bytes = bytes;
    for (int first = 0; first < blocks; first += cluster) run_cluster(first, cluster, threads, bytes);
}
extern "C" int blocks_of_last_launch() { return int(gridDim.x); }
extern "C" int shared_of_last_launch() { return last_bytes; }
extern "C" void set_emulator(int sms, int late, int backwards) {
    emulator.sms = sms, emulator.late = late, emulator.backwards = backwards;
}
extern "C" void set_beside(int beside) { emulator.beside = beside; }
extern "C" void set_delay(int most, int seed) { most_delay = most, drawn = unsigned(seed) * 7919u; }
extern "C" void set_clusters(int there) { emulator.clusters = there; }
extern "C" void set_shared(int byte) { before = char(byte); }
extern "C" void owe(char* into, const char* from, int64_t bytes) { owed = {into, from, bytes}; }
extern "C" int64_t still_owed() { return owed.bytes; }
extern "C" int take_brought(Brought* into, int most) {
    const int count = std::min(int(brought.size()), most);
    return std::copy_n(brought.begin(), count, into), brought.clear(), count;
}
extern "C" int take_handed() {
    const int count = handed;
    return handed = 0, count;
}
extern "C" int take_zeros() {
    const int count = zeros;
    return zeros = 0, count;
}
extern "C" int take_unwaited() {
    const int count = unwaited;
    return unwaited = 0, count;
}
