// The threads of one call: how they wait for each other and share out work. See crew.cpp.
#pragma once
#include <cstdint>

struct Crew;
using Job = void (*)(void* argument, Crew* crew, int self);

// Runs job on `count` threads, the caller's among them, and returns when all have. Where another call holds the workers, the
// caller runs alone (count 1): two callers never wait for each other.
void crew_run(int count, Job job, void* argument);
int crew_count(const Crew* crew);
// Everyone waits for everyone; what was written before is seen after. Every thread must call it equally often.
void crew_wait(Crew* crew, int self);
// The next of `items` to do between two waits, or -1: first of the thread's own share, then of what others have not begun.
int64_t crew_take(Crew* crew, int self, int64_t items);
