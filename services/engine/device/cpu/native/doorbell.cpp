#include "doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace catenary {

namespace {

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  (void)syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

// Returns at once if the word is another one by now, and at times for no reason.
void Doorbell::sleep(uint32_t seen) { futex(word_, FUTEX_WAIT_PRIVATE, seen); }

void Doorbell::wake() { futex(word_, FUTEX_WAKE_PRIVATE, INT_MAX); }

}  // namespace catenary
