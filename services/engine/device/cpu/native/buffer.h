// Memory that the kernels work in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace catenary {

constexpr int64_t kAlignment = 64;

inline int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Floats of a row whose successor begins aligned.
inline int64_t aligned_floats(int64_t count) {
  return aligned(count * int64_t{sizeof(float)}) / int64_t{sizeof(float)};
}

// Aligned bytes that only grow. What they held is lost when they do.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }

  // At least so many bytes. Throws std::bad_alloc.
  void* reserve(int64_t bytes) {
    if (bytes <= size_) return data_;
    std::free(data_);
    size_ = 0;
    data_ = std::aligned_alloc(kAlignment, static_cast<size_t>(aligned(bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = aligned(bytes);
    return data_;
  }

  float* floats(int64_t count) { return static_cast<float*>(reserve(count * int64_t{sizeof(float)})); }

  int64_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace catenary
