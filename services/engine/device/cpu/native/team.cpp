#include "team.h"

#include <pthread.h>
#include <sched.h>

namespace catenary {

namespace {

// About ten microseconds: longer than any thread works alone, shorter than the system lets another process run.
constexpr int kSpins = 400;
// Bytes that are asked for between two looks.
constexpr int64_t kAsked = 4 * Ahead::kLine;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void bind(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // Without the right to it the thread runs where the system puts it.
  (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Waits until `value` is no longer `seen`.
void await(const std::atomic<uint32_t>& value, uint32_t seen, Ahead* ahead) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != seen) return;
    if (ahead == nullptr || !ahead->ask(kAsked)) pause();
  }
  while (value.load(std::memory_order_acquire) == seen) value.wait(seen, std::memory_order_acquire);
}

}  // namespace

Team::Team(int size, const int32_t* cpus, int cpu_count)
    : size_(size < 1 ? 1 : size), claims_(new Claims[static_cast<size_t>(size_)]) {
  for (int rank = 1; rank < size_; ++rank) {
    const int cpu = cpu_count > 0 ? cpus[rank % cpu_count] : -1;
    threads_.emplace_back([this, rank, cpu] { serve(rank, cpu); });
  }
}

Team::~Team() {
  closing_ = true;
  jobs_.fetch_add(1, std::memory_order_release);
  jobs_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(Job job, void* context) {
  job_ = job;
  context_ = context;
  for (int rank = 0; rank < size_; ++rank) prepare(rank, 0);
  jobs_.fetch_add(1, std::memory_order_release);
  jobs_.notify_all();
  Worker worker(*this, 0);
  job(context, worker);
  // What the caller owns may be gone as soon as all have met: nobody looks ahead in it while he waits.
  worker.foresee(nullptr);
  worker.meet();
}

void Team::serve(int rank, int cpu) {
  if (cpu >= 0) bind(cpu);
  uint32_t seen = 0;
  for (;;) {
    // A team sleeps between jobs: the processes beside it need the cores then.
    while (jobs_.load(std::memory_order_acquire) == seen) jobs_.wait(seen, std::memory_order_acquire);
    seen = jobs_.load(std::memory_order_acquire);
    if (closing_) return;
    Worker worker(*this, rank);
    job_(context_, worker);
    worker.foresee(nullptr);
    worker.meet();
  }
}

void Worker::meet() {
  const uint32_t met = team_.met_.load(std::memory_order_relaxed);
  if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
    team_.arrived_.store(0, std::memory_order_relaxed);
    team_.met_.store(met + 1, std::memory_order_release);
    team_.met_.notify_all();
    return;
  }
  await(team_.met_, met, ahead_);
}

}  // namespace catenary
