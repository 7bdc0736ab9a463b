#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace catenary {

namespace {

// About ten microseconds: longer than any thread works alone, shorter than the system lets another process
// run.
constexpr int kSpins = 400;
// Bytes that are asked for between two looks.
constexpr int64_t kAsked = 4 * Prefetch::kLine;

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

}  // namespace

Team::Team(int size, const int32_t* cpus, int cpu_count)
    : size_(size < 1 ? 1 : size),
      seats_(new Seat[static_cast<size_t>(size_)]) {
  try {
    for (int rank = 1; rank < size_; ++rank) {
      const int cpu = cpu_count > 0 ? cpus[rank % cpu_count] : -1;
      threads_.emplace_back([this, rank, cpu] { serve(rank, cpu); });
    }
  } catch (...) {
    // The system gives no more threads, or no memory: those that are there wait for shares.
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
  share_.store(kClosing, std::memory_order_seq_cst);
  opened_.ring();
  for (std::thread& thread : threads_) thread.join();
}

void Team::compute(Part part, const void* work, int64_t count) {
  for (int rank = 0; rank < size_; ++rank) {
    seats_[static_cast<size_t>(rank)].taken.store(0, std::memory_order_relaxed);
  }
  part_ = part;
  work_ = work;
  count_ = count;
  const uint64_t last = share_.load(std::memory_order_relaxed), share = last + (is_open(last) ? 2 : 1);
  share_.store(share, std::memory_order_seq_cst);
  opened_.ring();
  part(*this, 0);
  wait_for_all(share);
}

// Every item is taken. Those who took one sit in the share until it is done, and nobody enters it twice.
void Team::wait_for_all(uint64_t share) {
  bool closed = false;
  for (int rank = 1; rank < size_; ++rank) {
    Seat& seat = seats_[static_cast<size_t>(rank)];
    const uint64_t seen = seat.share.load(std::memory_order_acquire);
    if (seen == share + 1) continue;
    if (seen != share && !closed) {
      // Somebody has not come yet.
      share_.store(share + 1, std::memory_order_seq_cst);
      closed = true;
    }
    wait_for(seat, share);
  }
}

void Team::wait_for(Seat& seat, uint64_t share) {
  Prefetch* ahead = ahead_of(0);
  // The first look is ordered after the closing, see serve().
  if (seat.share.load(std::memory_order_seq_cst) != share) return;
  for (int spin = 0; spin < kSpins; ++spin) {
    if (seat.share.load(std::memory_order_acquire) != share) return;
    if (ahead == nullptr || !ahead->ask(kAsked)) pause();
  }
  seat.left.sleep_until([&] { return seat.share.load(std::memory_order_seq_cst) != share; });
}

void Team::serve(int rank, int cpu) {
  if (cpu >= 0) bind(cpu);
  Seat& seat = seats_[static_cast<size_t>(rank)];
  Prefetch::Part wanted{};
  for (uint64_t share = 0; (share = next_share(share, wanted)) != kClosing;) {
    seat.share.store(share, std::memory_order_seq_cst);
    // Sequentially consistent: either this sees that the share was closed, or its caller that somebody sits
    // in it.
    if (share_.load(std::memory_order_seq_cst) == share) {
      Prefetch* ahead = ahead_of(rank);
      if (ahead != nullptr) ahead->asked(wanted);
      part_(*this, rank);
      wanted = ahead == nullptr ? Prefetch::Part{} : ahead->next(Prefetch::kMost);
    }
    seat.share.store(share + 1, std::memory_order_seq_cst);
    seat.left.ring();
  }
}

// Waits for a share that is open and not the last one, asking for what is wanted meanwhile. Spins shortly: a
// forward has hundreds of shares, each a microsecond apart from the one before, and a thread that sleeps
// takes fifty to wake up.
uint64_t Team::next_share(uint64_t last, Prefetch::Part& wanted) {
  const auto is_next = [last](uint64_t share) { return is_open(share) && share != last; };
  int64_t asked = 0;
  uint64_t share = 0;
  for (int spin = 0; spin < kSpins && !is_next(share); ++spin) {
    share = share_.load(std::memory_order_acquire);
    const int64_t bytes = std::min(kAsked, wanted.bytes - asked);
    if (bytes > 0) {
      Prefetch::ask({wanted.from + asked, bytes, wanted.once});
      asked += bytes;
    } else {
      pause();
    }
  }
  if (!is_next(share)) {
    opened_.sleep_until([&] { return is_next(share = share_.load(std::memory_order_seq_cst)); });
  }
  wanted.bytes = asked;
  return share;
}

}  // namespace catenary
