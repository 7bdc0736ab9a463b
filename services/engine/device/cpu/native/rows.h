// Rows of numbers as they lie outside of a forward, to float32 and back.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace catenary {

template <typename Element>
inline void widen_row(const Element* from, int64_t size, float factor, float* to) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) store(to + at, load(from + at) * factor);
  for (; at < size; ++at) to[at] = to_float(from[at]) * factor;
}

// Row `row` of a table [rows, size], times the factor.
inline void read_row(CacheKind kind, const void* table, int64_t row, int64_t size, float factor, float* to) {
  if (kind == CacheKind::kBfloat16) {
    widen_row(static_cast<const Bf16*>(table) + row * size, size, factor, to);
  } else {
    widen_row(static_cast<const float*>(table) + row * size, size, factor, to);
  }
}

inline void write_row(CacheKind kind, const float* from, int64_t row, int64_t size, void* table) {
  if (kind == CacheKind::kBfloat16) {
    convert(from, size, static_cast<Bf16*>(table) + row * size);
  } else {
    convert(from, size, static_cast<float*>(table) + row * size);
  }
}

inline int64_t item_size(CacheKind kind) { return kind == CacheKind::kBfloat16 ? 2 : 4; }

// to += factor * from.
inline void add_row(const float* from, int64_t size, float factor, float* to) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {
    store(to + at, fma(splat(factor), load(from + at), load(to + at)));
  }
  for (; at < size; ++at) to[at] += factor * from[at];
}

}  // namespace catenary
