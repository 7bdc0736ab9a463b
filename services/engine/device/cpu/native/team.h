// Threads that help the thread that computes a forward.
//
// The caller runs the forward, one phase after another, and opens a share for each phase that is worth
// dividing. The team's threads help with what is open when they come, item by item. Nobody waits for a thread
// that has not come: a machine that other processes use takes a thread away now and then, for as long as it
// likes, and the others do its items meanwhile.
//
// What makes that safe: a thread of the team touches what a share works on (the work itself, its counters,
// what it reads and writes, and what the thread foresees) only between entering that share and leaving it. It
// says in its seat which share it enters, looks whether that is still open, and only then reads anything.
// If somebody has not come when all items are done, the caller closes the share and waits for those who sit
// in it; if all have come and left, nobody is left to enter it, since no thread enters a number twice.
// Shares are numbered by 64 bits, so a number is never seen twice. So when the caller goes on, and be it to
// free everything but the team, nobody is left who knows of it. What is done between shares, the caller
// does alone. With one thread a share is a loop.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "prefetch.h"
#include "doorbell.h"

namespace catenary {

// Items [begin, end).
struct Run {
  int64_t begin;
  int64_t end;
};

// A thread's items of `count`.
inline Run run_of(int64_t count, int rank, int threads) {
  return {count * rank / threads, count * (rank + 1) / threads};
}

// Who does an item: the caller's rank is 0. first: of those that the thread does in this share. own: of its
// own run. ahead: what it foresees, null if nothing is known.
struct Hand {
  int rank;
  bool first;
  bool own;
  Prefetch* ahead;
};

class Team {
 public:
  // cpus: `cpu_count` numbers of CPUs, to which the threads are bound in turn (rank 0, the caller's thread,
  // is not); none: they are not bound. Throws if there are no such threads.
  Team(int size, const int32_t* cpus, int cpu_count);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls work(item, hand) for each item in [0, count) once, in any thread. Returns when all are done. One
  // caller at a time, and none out of work().
  template <typename Work>
  void share(int64_t count, Work&& work) {
    share_as(count, false, work);
  }

  // The same, but each thread begins with a run of its own (run_of), in order. Who is done early takes items
  // from the end of another's run.
  template <typename Work>
  void share_runs(int64_t count, Work&& work) {
    share_as(count, true, work);
  }

 private:
  friend class Foresight;

  // A thread's part in the open share.
  using Part = void (*)(Team& team, int rank);

  // A thread's own line.
  struct alignas(64) Seat {
    // The share that the thread sits in, or the next number if it has left it; the caller waits for that at
    // the bell.
    std::atomic<uint64_t> share{0};
    Doorbell left;
    // Of its items in the open share: how many were taken from the front, by itself, and from the end, by
    // others. No two are the same while both together are fewer than there are.
    std::atomic<uint64_t> taken{0};
  };
  static constexpr uint64_t kFront = 1, kEnd = uint64_t{1} << 32;

  // Beyond all numbers of shares.
  static constexpr uint64_t kClosing = ~uint64_t{0};
  static bool is_open(uint64_t share) { return share % 2 == 1; }

  template <typename Work>
  void share_as(int64_t count, bool runs, Work& work);
  template <typename Work>
  static void do_items(Team& team, int rank);
  template <typename Work>
  static void do_runs(Team& team, int rank);

  // Takes one of a run's items: its number from the begin, or -1.
  int64_t take(int rank, int64_t items, uint64_t side);
  void compute(Part part, const void* work, int64_t count);
  void wait_for_all(uint64_t share);
  void wait_for(Seat& seat, uint64_t share);
  void serve(int rank, int cpu);
  void dismiss();
  uint64_t next_share(uint64_t last, Prefetch::Part& wanted);
  Prefetch* ahead_of(int rank) { return aheads_ == nullptr ? nullptr : aheads_ + rank; }

  const int size_;
  const std::unique_ptr<Seat[]> seats_;
  // What is open, if the number is odd; the rest is in the same line.
  alignas(64) std::atomic<uint64_t> share_{0};
  Part part_ = nullptr;
  const void* work_ = nullptr;
  int64_t count_ = 0;
  Prefetch* aheads_ = nullptr;
  alignas(64) Doorbell opened_;
  std::vector<std::thread> threads_;
};

// What threads will read in the shares of a scope, by rank, of which memory is asked for while they wait.
// Null: nothing is known.
class Foresight {
 public:
  Foresight(Team& team, Prefetch* aheads) : team_(team) { team.aheads_ = aheads; }
  ~Foresight() { team_.aheads_ = nullptr; }
  Foresight(const Foresight&) = delete;
  Foresight& operator=(const Foresight&) = delete;

 private:
  Team& team_;
};

inline int64_t Team::take(int rank, int64_t items, uint64_t side) {
  const auto left = [items](uint64_t taken) {
    return items - static_cast<int64_t>(taken % kEnd) - static_cast<int64_t>(taken / kEnd);
  };
  std::atomic<uint64_t>& taken = seats_[static_cast<size_t>(rank)].taken;
  // Only to look costs others nothing.
  if (left(taken.load(std::memory_order_relaxed)) <= 0) return -1;
  const uint64_t before = taken.fetch_add(side, std::memory_order_relaxed);
  if (left(before) <= 0) return -1;
  if (side == kFront) return static_cast<int64_t>(before % kEnd);
  return items - 1 - static_cast<int64_t>(before / kEnd);
}

template <typename Work>
void Team::share_as(int64_t count, bool runs, Work& work) {
  if (size_ > 1 && count > 1) return compute(runs ? do_runs<Work> : do_items<Work>, &work, count);
  for (int64_t item = 0; item < count; ++item) work(item, Hand{0, item == 0, true, ahead_of(0)});
}

template <typename Work>
void Team::do_items(Team& team, int rank) {
  const Work& work = *static_cast<const Work*>(team.work_);
  Hand hand{rank, true, false, team.ahead_of(rank)};
  for (int64_t item; (item = team.take(0, team.count_, kFront)) >= 0; hand.first = false) work(item, hand);
}

template <typename Work>
void Team::do_runs(Team& team, int rank) {
  const Work& work = *static_cast<const Work*>(team.work_);
  Hand hand{rank, true, true, team.ahead_of(rank)};
  for (int turn = 0; turn < team.size_; ++turn) {
    const int owner = (rank + turn) % team.size_;
    const Run run = run_of(team.count_, owner, team.size_);
    hand.own = turn == 0;
    const uint64_t side = hand.own ? kFront : kEnd;
    for (int64_t item; (item = team.take(owner, run.end - run.begin, side)) >= 0; hand.first = false) {
      work(run.begin + item, hand);
    }
  }
}

}  // namespace catenary
