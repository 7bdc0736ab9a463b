// The weights that one thread will read, in the order in which it will, so that memory is asked for them beforehand: also
// while the thread waits for others, or computes what reads little. Memory that rests is what a decode waits for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace catenary {

class Ahead {
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
    at_ = next_ = 0;
  }

  bool empty() const { return stretches_.empty(); }

  // The thread has come to all stretches but one.
  bool last() const { return next_ + 1 == stretches_.size(); }

  // once: it is used once, and passes the caches by.
  void add(const uint8_t* from, int64_t bytes, bool once) {
    stretches_.push_back({from, bytes, total_, once});
    total_ += bytes;
  }

  // The thread comes to the next stretch, whether it read all of the one before or others did.
  void begin() {
    read_ = next_ < stretches_.size() ? stretches_[next_].before : total_;
    if (asked_ < read_) {
      asked_ = read_;
      at_ = next_;
    }
    ++next_;
  }

  // It reads so many bytes of its stretch now.
  void reads(int64_t bytes) { read_ += bytes; }

  // What is to be asked for next, `bytes` at the most: they follow one another. None where enough is asked for.
  struct Part {
    const uint8_t* from;
    int64_t bytes;
    bool once;
  };
  Part take(int64_t bytes) {
    while (at_ < stretches_.size() && asked_ >= stretches_[at_].before + stretches_[at_].bytes) ++at_;
    if (at_ >= stretches_.size()) return {nullptr, 0, false};
    const Stretch& stretch = stretches_[at_];
    const int64_t done = asked_ - stretch.before;
    bytes = std::min({bytes, stretch.bytes - done, read_ + (stretch.once ? kMostOnce : kMost) - asked_});
    if (bytes <= 0) return {nullptr, 0, false};
    asked_ += bytes;
    return {stretch.from + done, bytes, stretch.once};
  }

  // Asks for so many bytes, or what is left. False: there is nothing to ask for.
  bool ask(int64_t bytes) {
    const Part part = take(bytes);
    for (int64_t offset = 0; offset < part.bytes; offset += kLine) {
      if (part.once) {
        __builtin_prefetch(part.from + offset, 0, 0);
      } else {
        __builtin_prefetch(part.from + offset, 0, 2);
      }
    }
    return part.bytes > 0;
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
  // The one that the thread comes to next.
  size_t next_ = 0;
};

}  // namespace catenary
