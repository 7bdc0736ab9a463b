// The team of compute threads by itself: `team THREADS ROUNDS SEED`. Ends with 0 if all is as it should be.
//
// Threads are stopped at arbitrary instructions by a signal whose handler sleeps; all that a share works on
// is freed soon after it. So sanitizers see who touches it too late. (The one for threads delivers signals
// when it likes: then nobody is stopped.)
#include "team.h"

#include <dirent.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

using catenary::Prefetch;
using catenary::Foresight;
using catenary::Hand;
using catenary::Team;

namespace {

using Random = std::mt19937;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void sleep_microseconds(long count) {
  const timespec time{0, count * 1000};
  nanosleep(&time, nullptr);
}

// ---- Threads that are stopped ----

#if defined(__SANITIZE_THREAD__)
constexpr bool kStops = false;
#else
constexpr bool kStops = true;
#endif

sem_t held, released;

extern "C" void doze(int) { sleep_microseconds(300); }

extern "C" void hold(int) {
  sem_post(&held);
  while (sem_wait(&released) != 0) {
  }
}

std::vector<pid_t> threads_but(std::initializer_list<pid_t> spared) {
  std::vector<pid_t> found;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    const pid_t id = static_cast<pid_t>(std::atoi(task->d_name));
    bool wanted = id > 0;
    for (const pid_t other : spared) wanted = wanted && id != other;
    if (wanted) found.push_back(id);
  }
  closedir(tasks);
  return found;
}

pid_t own_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void send(pid_t thread, int signal) { (void)syscall(SYS_tgkill, getpid(), thread, signal); }

// Stops some thread of the process now and then, the caller of the team too.
class Disturbance {
 public:
  explicit Disturbance(unsigned seed) : thread_([this, seed] { disturb(seed); }) {}
  ~Disturbance() {
    over_.store(true);
    thread_.join();
  }

 private:
  void disturb(unsigned seed) {
    Random random(seed);
    while (!over_.load()) {
      const std::vector<pid_t> threads = threads_but({own_id()});
      if (!threads.empty()) send(threads[random() % threads.size()], SIGUSR1);
      sleep_microseconds(static_cast<long>(random() % 1500));
    }
  }

  std::atomic<bool> over_{false};
  std::thread thread_;
};

// ---- Forwards ----

// What a forward works on: gone when it ends.
struct Forward {
  std::vector<std::vector<int64_t>> rows;
  std::vector<uint8_t> weights = std::vector<uint8_t>(1 << 16);
  std::vector<Prefetch> aheads;
};

// An item of a phase: of two items of the phase before it.
int64_t computed(const std::vector<int64_t>& before, size_t item) {
  const size_t count = before.size();
  return before[item % count] * 31 + before[(item * 7 + 1) % count] + static_cast<int64_t>(item);
}

void rest(Random& random) {
  const unsigned chance = random() % 64;
  if (chance == 0) sleep_microseconds(static_cast<long>(random() % 200));
  if (chance < 4) std::this_thread::yield();
}

void run_forward(Team& team, unsigned seed) {
  Random random(seed);
  auto forward = std::make_unique<Forward>();
  forward->aheads.resize(static_cast<size_t>(team.size()));
  for (Prefetch& ahead : forward->aheads) {
    for (int part = 0; part < 8; ++part) {
      ahead.add(forward->weights.data() + part * 8192, 8192, part % 2 == 0);
    }
  }
  const Foresight foresight(team, random() % 2 == 0 ? forward->aheads.data() : nullptr);
  forward->rows.push_back({1, 2, 3});
  const int phases = 1 + static_cast<int>(random() % 12);
  for (int phase = 0; phase < phases; ++phase) {
    const int64_t sizes[] = {1, 2, 3, static_cast<int64_t>(1 + random() % 40), 200};
    const int64_t count = sizes[random() % 5];
    const std::vector<int64_t> before = forward->rows.back();
    std::vector<int64_t> now(static_cast<size_t>(count), -1);
    std::vector<int> times(now.size(), 0);
    const auto work = [&](int64_t item, const Hand& hand) {
      Random own(seed + static_cast<unsigned>(item * 64 + phase));
      if (hand.first && hand.ahead != nullptr) hand.ahead->begin(phase % 8);
      rest(own);
      const size_t at = static_cast<size_t>(item);
      now[at] = computed(before, at);
      ++times[at];
      if (hand.ahead != nullptr) hand.ahead->reads(64);
    };
    if (random() % 2 == 0) {
      team.share(count, work);
    } else {
      team.share_runs(count, work);
    }
    team.share(0, work);
    for (size_t item = 0; item < now.size(); ++item) {
      check(times[item] == 1, "an item was not done once");
      check(now[item] == computed(before, item), "an item was computed of something else");
    }
    forward->rows.push_back(now);
  }
}

void run_rounds(int threads, int rounds, unsigned seed) {
  const auto disturbance = kStops ? std::make_unique<Disturbance>(seed) : nullptr;
  for (int round = 0; round < rounds; ++round) {
    const unsigned own = seed * 1000003u + static_cast<unsigned>(round);
    auto team = std::make_unique<Team>(threads, nullptr, 0);
    for (unsigned forward = 0; forward < 8; ++forward) {
      // Callers take turns.
      if (forward % 4 == 3) {
        std::thread([&] { run_forward(*team, own + 7919 * forward); }).join();
      } else {
        run_forward(*team, own + 7919 * forward);
      }
      if (forward % 3 == 2) sleep_microseconds(300);
    }
  }
}

// All threads of a team are held: the caller does everything, and waits for none of them. It would wait for
// ever.
void run_without_threads(int threads) {
  Team team(threads, nullptr, 0);
  run_forward(team, 1);
  for (const pid_t thread : threads_but({own_id()})) send(thread, SIGUSR2);
  for (int rank = 1; rank < threads; ++rank) {
    while (sem_wait(&held) != 0) {
    }
  }
  for (unsigned seed = 0; seed < 20; ++seed) run_forward(team, seed);
  for (int rank = 1; rank < threads; ++rank) sem_post(&released);
  for (unsigned seed = 0; seed < 20; ++seed) run_forward(team, seed);
}

}  // namespace

int main(int count, char** arguments) {
  check(count == 4, "usage: team THREADS ROUNDS SEED");
  const int threads = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]);
  sem_init(&held, 0, 0);
  sem_init(&released, 0, 0);
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = hold;
  sigaction(SIGUSR2, &action, nullptr);
  action.sa_handler = doze;
  sigaction(SIGUSR1, &action, nullptr);
  if (kStops) run_without_threads(threads);
  run_rounds(threads, rounds, static_cast<unsigned>(std::atoi(arguments[3])));
}
