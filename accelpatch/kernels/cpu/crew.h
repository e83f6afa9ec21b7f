// The threads of one call: how they wait for each other and share out work. See crew.cpp.
#pragma once
#include <cstdint>

struct Crew;
using Job = void (*)(void* argument, Crew* crew, int self);

// Runs job on `count` threads, the caller's among them, and returns when all have.
// CREW_DECODING: on threads of our own, which then spin some time for the next call; a decode loop comes back within a
// millisecond. Where another call holds them, the caller runs alone (count 1): two callers never wait for each other.
// CREW_GUEST: on the OpenMP threads of the program that we are in (ap_use_team), as torch's own operations are: after each of
// those they spin for a while, and threads of ours would have to fight them for the cores. Where there are none: on ours.
enum CrewKind { CREW_DECODING, CREW_GUEST };
void crew_run(int count, Job job, void* argument, CrewKind kind);
int crew_count(const Crew* crew);
// Everyone waits for everyone; what was written before is seen after. Every thread must call it equally often.
void crew_wait(Crew* crew, int self);
// What a thread has before it of the items of a phase (the time between two waits): first its own share, piece by piece, then
// pieces of other shares that nobody has begun. Begin one anew in each phase.
struct Turn {
  int64_t items;
  int64_t next = 0, end = 0;  // the piece in hand
  int tried = 0;              // shares found empty
};

// Takes another piece in hand; false when nothing is left.
bool crew_take(Crew* crew, int self, Turn* turn);

// The next item to do, or -1.
static inline int64_t crew_next(Crew* crew, int self, Turn* turn) {
  if (turn->next == turn->end && !crew_take(crew, self, turn)) return -1;
  return turn->next++;
}

// Where a thread's own share begins.
int64_t crew_share(const Crew* crew, int self, int64_t items);
