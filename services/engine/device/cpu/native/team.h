// Threads that compute one forward together.
//
// They sleep between forwards and wait for one another by spinning shortly within one: a forward has hundreds of
// meeting points, each a microsecond apart from the next work, and a thread that sleeps takes fifty to wake up. A
// machine that other processes use takes a thread away now and then; so those who wait stop spinning soon, and work
// is claimed piece by piece and not divided beforehand.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "ahead.h"

namespace catenary {

class Team;

// Items [begin, end).
struct Run {
  int64_t begin;
  int64_t end;
};

// A thread's items of `count`.
inline Run run_of(int64_t count, int rank, int threads) { return {count * rank / threads, count * (rank + 1) / threads}; }

// One thread's part in a job.
class Worker {
 public:
  Worker(Team& team, int rank) : team_(team), rank_(rank) {}

  int rank() const { return rank_; }
  int threads() const;

  // What the thread will read, of which memory is asked for while it waits for others. Null: nothing is known.
  void foresee(Ahead* ahead) { ahead_ = ahead; }
  Ahead* ahead() const { return ahead_; }

  // Calls work(item) for each item in [0, count) once, in any thread; every thread of the team calls this. Returns in
  // all of them when all items are done.
  template <typename Work>
  void share(int64_t count, Work&& work);

  // The same, but each thread begins with a run of its own (run_of), in order. Who is done early takes items from the
  // end of another's run; `own` tells work(item, own) which it is.
  template <typename Work>
  void share_runs(int64_t count, Work&& work);

  // Waits until every thread of the team is here.
  void meet();

 private:
  Team& team_;
  const int rank_;
  uint32_t shares_ = 0;
  Ahead* ahead_ = nullptr;
};

class Team {
 public:
  using Job = void (*)(void* context, Worker& worker);

  // cpus: `cpu_count` numbers of CPUs, to which the threads are bound in turn (rank 0, the caller's thread, is not);
  // none: they are not bound.
  Team(int size, const int32_t* cpus, int cpu_count);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs the job in every thread, the caller's included, and returns when all have ended. One job at a time.
  void run(Job job, void* context);

 private:
  friend class Worker;
  void serve(int rank, int cpu);

  // Of one thread's items in a share: how many were taken from the front, by itself, and from the end, by others. No
  // two are the same while both together are fewer than there are.
  struct alignas(64) Claims {
    // Of three counters one is in use, one was, and one is being made ready for the next share.
    std::atomic<uint64_t> taken[3] = {};
  };
  static constexpr uint64_t kFront = 1, kEnd = uint64_t{1} << 32;

  // Takes one of a run's items: its number from the begin, or -1.
  int64_t take(int rank, uint32_t share, int64_t items, uint64_t side) {
    const uint64_t taken = claims_[rank].taken[share % 3].fetch_add(side, std::memory_order_relaxed);
    const int64_t front = static_cast<int64_t>(taken % kEnd), end = static_cast<int64_t>(taken / kEnd);
    if (front + end >= items) return -1;
    return side == kFront ? front : items - 1 - end;
  }

  void prepare(int rank, uint32_t share) { claims_[rank].taken[share % 3].store(0, std::memory_order_relaxed); }

  const int size_;
  const std::unique_ptr<Claims[]> claims_;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> met_{0};
  alignas(64) std::atomic<uint32_t> jobs_{0};
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

inline int Worker::threads() const { return team_.size_; }

template <typename Work>
void Worker::share(int64_t count, Work&& work) {
  const uint32_t share = shares_++;
  // Nobody takes by the next counters before all have met at the end of this share, nor since the end of the last but
  // one.
  team_.prepare(rank_, share + 1);
  for (int64_t item; (item = team_.take(0, share, count, Team::kFront)) >= 0;) work(item);
  meet();
}

template <typename Work>
void Worker::share_runs(int64_t count, Work&& work) {
  const uint32_t share = shares_++;
  team_.prepare(rank_, share + 1);
  for (int turn = 0; turn < team_.size_; ++turn) {
    const int owner = (rank_ + turn) % team_.size_;
    const Run run = run_of(count, owner, team_.size_);
    const uint64_t side = turn == 0 ? Team::kFront : Team::kEnd;
    for (int64_t item; (item = team_.take(owner, share, run.end - run.begin, side)) >= 0;) {
      work(run.begin + item, turn == 0);
    }
  }
  meet();
}

}  // namespace catenary
