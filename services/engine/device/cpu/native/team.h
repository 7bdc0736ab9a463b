// Threads that compute one forward together.
//
// They sleep between forwards and wait for one another by spinning shortly within one: a forward has hundreds of
// meeting points, each a microsecond apart from the next work, and a thread that sleeps takes fifty to wake up. A
// machine that other processes use takes a thread away now and then; so those who wait stop spinning soon, and work
// is claimed piece by piece and not divided beforehand.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace catenary {

class Team;

// One thread's part in a job.
class Worker {
 public:
  Worker(Team& team, int rank) : team_(team), rank_(rank) {}

  int rank() const { return rank_; }

  // Calls work(item) for each item in [0, count) once, in any thread; every thread of the team calls this. Returns in
  // all of them when all items are done.
  template <typename Work>
  void share(int64_t count, Work&& work);

  // Waits until every thread of the team is here.
  void meet();

 private:
  Team& team_;
  int rank_;
  uint32_t shares_ = 0;
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

  const int size_;
  // Claims of items: of three counters one is in use, one was, and one is being made ready for the next share.
  std::atomic<int64_t> claimed_[3] = {};
  std::atomic<int32_t> arrived_{0};
  std::atomic<uint32_t> met_{0};
  std::atomic<uint32_t> jobs_{0};
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

template <typename Work>
void Worker::share(int64_t count, Work&& work) {
  std::atomic<int64_t>& claimed = team_.claimed_[shares_ % 3];
  // Nobody counts by the next one before all have met at the end of this share, nor since the end of the last but one.
  if (rank_ == 0) team_.claimed_[(shares_ + 1) % 3].store(0, std::memory_order_relaxed);
  ++shares_;
  for (int64_t item; (item = claimed.fetch_add(1, std::memory_order_relaxed)) < count;) work(item);
  meet();
}

}  // namespace catenary
