// Where threads sleep until there is something for them.
#pragma once

#include <atomic>
#include <cstdint>

namespace catenary {

class Doorbell {
 public:
  // Sleeps until `ready` is true. Whoever makes it so does that before it rings, and both are sequentially
  // consistent: either the sleeper sees it, or the other that somebody is about to sleep.
  template <typename Ready>
  void sleep_until(Ready&& ready) {
    for (;;) {
      const uint32_t seen = word_.fetch_or(kAsleep, std::memory_order_seq_cst) | kAsleep;
      if (ready()) return;
      sleep(seen);
    }
  }

  // Wakes all. No call of the system where nobody has gone to sleep since the last time. One thread at a time
  // rings.
  void ring() {
    if ((word_.load(std::memory_order_seq_cst) & kAsleep) == 0) return;
    // Clears the bit and counts: who has looked and does not sleep yet finds another number and looks again,
    // also if the next one has set the bit meanwhile.
    word_.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }

 private:
  void sleep(uint32_t seen);
  void wake();

  static constexpr uint32_t kAsleep = 1;

  // How often it rang for somebody, times 2, and whether somebody sleeps.
  std::atomic<uint32_t> word_{0};
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the system looks at it as a number");
};

}  // namespace catenary
