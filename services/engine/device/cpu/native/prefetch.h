// The weights that one thread will read, in the order in which it will, so that memory is asked for them
// beforehand: also while the thread waits for others, or computes what reads little. Memory that rests is
// what a decode waits for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace catenary {

// In lines of its own: every thread writes to what it foresees.
class alignas(64) Prefetch {
 public:
  // What memory may be asked for before it is read: a part of a second-level cache, or of a first-level one.
  static constexpr int64_t kMost = 128 << 10, kMostOnce = 24 << 10;

  // Nothing is known.
  void clear() {
    stretches_.clear();
    total_ = 0;
    restart();
  }

  // The thread is before the first stretch.
  void restart() {
    read_ = asked_ = 0;
    at_ = 0;
  }

  bool empty() const { return stretches_.empty(); }

  // once: it is used once, and passes the caches by.
  void add(const uint8_t* from, int64_t bytes, bool once) {
    stretches_.push_back({from, bytes, total_, once});
    total_ += bytes;
  }

  // The thread comes to the `nth` stretch, from 0 on, whoever read those before.
  void begin(int64_t nth) {
    const size_t stretch = static_cast<size_t>(nth);
    read_ = stretch < stretches_.size() ? stretches_[stretch].before : total_;
    // Also where it has been behind it already.
    if (asked_ < read_ || asked_ > read_ + kMost) {
      asked_ = read_;
      at_ = stretch;
    }
  }

  // It reads so many bytes of its stretch now.
  void reads(int64_t bytes) { read_ += bytes; }

  // Bytes that follow one another in memory.
  struct Part {
    const uint8_t* from = nullptr;
    int64_t bytes = 0;
    bool once = false;
  };

  // What is to be asked for next, `bytes` at the most. None where enough is asked for.
  Part next(int64_t bytes) {
    while (at_ < stretches_.size() && asked_ >= stretches_[at_].before + stretches_[at_].bytes) ++at_;
    if (at_ >= stretches_.size()) return {};
    const Stretch& stretch = stretches_[at_];
    const int64_t done = asked_ - stretch.before;
    bytes = std::min({bytes, stretch.bytes - done, read_ + (stretch.once ? kMostOnce : kMost) - asked_});
    if (bytes <= 0) return {};
    return {stretch.from + done, bytes, stretch.once};
  }

  // A part was asked for, by who knew that it would be the next one. If another is now, that counts for
  // nothing.
  void asked(const Part& part) {
    const Part now = next(part.bytes);
    if (now.from == part.from) asked_ += now.bytes;
  }

  // The next part, which the thread asks for now.
  Part take(int64_t bytes) {
    const Part part = next(bytes);
    asked_ += part.bytes;
    return part;
  }

  // Asks for so many bytes, or what is left. False: there is nothing to ask for.
  bool ask(int64_t bytes) {
    const Part part = take(bytes);
    ask(part);
    return part.bytes > 0;
  }

  // Asks for memory, whatever is there now: nothing is read.
  static void ask(const Part& part) {
    for (int64_t offset = 0; offset < part.bytes; offset += kLine) {
      if (part.once) {
        __builtin_prefetch(part.from + offset, 0, 0);
      } else {
        __builtin_prefetch(part.from + offset, 0, 2);
      }
    }
  }

  static constexpr int64_t kLine = 64;

 private:
  struct Stretch {
    const uint8_t* from;
    int64_t bytes;
    // Of the stretches before it.
    int64_t before;
    bool once;
  };
  std::vector<Stretch> stretches_;
  int64_t total_ = 0;
  // Bytes from the first stretch on: read, and asked for; and the stretch that the latter are in.
  int64_t read_ = 0;
  int64_t asked_ = 0;
  size_t at_ = 0;
};

}  // namespace catenary
