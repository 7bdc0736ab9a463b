// Keys and values of a chunk of positions, brought from their slots into the panels that the products want.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "attention_products.h"
#include "simd.h"

namespace catenary {

// What is multiplied as pairs, and what as floats.
template <typename Cached>
using PackedOf = std::conditional_t<std::is_same_v<Cached, Bf16> && kMultipliesPairs, Bf16, float>;

constexpr int kMostDims = 256;

// Positions of a chunk, from its first one.
struct Range {
  int first;
  int end;

  bool empty() const { return first >= end; }
};

// Keys or values of one kv head at the positions of a chunk. Those beside the range are zeros: nobody sees
// them, and their slots may hold anything.
template <typename Cached>
struct ChunkRows {
  const Cached* cache;
  // Of the positions in the range: elements from `cache` on.
  const int64_t* offsets;
  int dims;
  Range range;

  const Cached* operator[](int position) const {
    return position < range.first || position >= range.end ? kZeros : cache + offsets[position];
  }

  // Asks for the rows at positions [first, end), which will be read soon.
  void ask(int first, int end) const {
    // GCC drops calls of what has no effect that it knows of.
    __asm__ volatile("");
    const int last = std::min(end, range.end);
    for (int position = std::max(first, range.first); position < last; ++position) {
      const Cached* row = cache + offsets[position];
      constexpr int kLine = 64 / sizeof(Cached);
      for (int dim = 0; dim < dims; dim += kLine) __builtin_prefetch(row + dim, 0, 2);
    }
  }

 private:
  alignas(64) static constexpr Cached kZeros[kMostDims] = {};
};

namespace packing {

// A vector of units of a row, zeros beyond `count` units.
inline U32 units_at(const Bf16* row, int count, Units<Bf16>) { return load_first(row, count); }

inline U32 units_at(const float* row, int count, Units<float>) { return load_first(row, count); }

inline U32 units_at(const Bf16* row, int count, Units<float>) {
  if (count >= kLanes) return bits_as<U32>(load(row));
  const U32 pairs = load_first(row, count / 2);
  U16 halves;
  std::memcpy(&halves, &pairs, sizeof halves);
  return bits_as<U32>(widen(halves));
}

// One step of a transposition: swaps the lanes of `a` that have the bit kBit with those of `b` that have it
// not.
template <int kBit, size_t... kLane>
inline void swap_lanes(U32& a, U32& b, std::index_sequence<kLane...>) {
  const U32 low = __builtin_shufflevector(a, b, ((kLane & kBit) ? kLanes + kLane - kBit : kLane)...);
  const U32 high = __builtin_shufflevector(a, b, ((kLane & kBit) ? kLanes + kLane : kLane + kBit)...);
  a = low;
  b = high;
}

template <int kBit>
inline void transpose_by(U32* rows) {
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    if (!(row & kBit)) swap_lanes<kBit>(rows[row], rows[row + kBit], std::make_index_sequence<kLanes>());
  }
}

// Lane r of row c becomes lane c of row r.
inline void transpose(U32* rows) {
  transpose_by<1>(rows);
  transpose_by<2>(rows);
  if constexpr (kLanes > 4) transpose_by<4>(rows);
  if constexpr (kLanes > 8) transpose_by<8>(rows);
}

// A vector of units of each of kLanes rows, as one vector of rows for each unit.
template <typename Cached>
inline void load_transposed(const Cached* const* row, int unit, int units, U32* lanes) {
  using Unit = Units<PackedOf<Cached>>;
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = units_at(row[lane] + unit * Unit::kInputs, units - unit, Unit());
  }
  transpose(lanes);
}

typedef uint16_t Halves __attribute__((vector_size(kBytes)));

// Halves of two vectors in turn: the first halves of both, and so on; kFrom: 0, or kLanes for those of the
// upper parts.
template <int kFrom, size_t... kHalf>
inline U32 interleave(U32 a, U32 b, std::index_sequence<kHalf...>) {
  return bits_as<U32>(__builtin_shufflevector(bits_as<Halves>(a), bits_as<Halves>(b),
                                              (kFrom + kHalf / 2 + (kHalf & 1) * 2 * kLanes)...));
}

template <int kFrom>
inline U32 interleave(U32 a, U32 b) {
  return interleave<kFrom>(a, b, std::make_index_sequence<2 * kLanes>());
}

// The sign of a lane's halves (of the lane, for floats) is set if they are infinite or no number.
inline U32 strange(U32 units, Units<float>) { return ((units & 0x7f800000u) + 0x00800000u) & 0x80000000u; }
inline U32 strange(U32 units, Units<Bf16>) { return ((units & 0x7f807f80u) + 0x00800080u) & 0x80008000u; }

inline bool any(U32 lanes) {
  uint32_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found |= lanes[lane];
  return found != 0;
}

}  // namespace packing

// Keys as panels [dims in units][kWidth positions].
template <typename Cached>
void pack_keys(const ChunkRows<Cached>& keys, int units, uint32_t* panels) {
  for (int position = keys.range.first / kLanes * kLanes; position < keys.range.end; position += kLanes) {
    uint32_t* to = panels + static_cast<int64_t>(position / kWidth) * units * kWidth + position % kWidth;
    const Cached* rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rows[lane] = keys[position + lane];
    for (int unit = 0; unit < units; unit += kLanes) {
      U32 lanes[kLanes];
      packing::load_transposed(rows, unit, units, lanes);
      const int count = std::min(kLanes, units - unit);
      if (count == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) std::memcpy(to + (unit + i) * kWidth, &lanes[i], kBytes);
      } else {
        for (int i = 0; i < count; ++i) std::memcpy(to + (unit + i) * kWidth, &lanes[i], kBytes);
      }
    }
  }
}

// Values as panels [positions in units][kWidth dims], `panel_stride` units each. Tells whether a number among
// them is infinite or none, if kLook.
template <bool kLook, typename Cached>
bool pack_values(const ChunkRows<Cached>& values, int64_t panel_stride, uint32_t* panels) {
  using Unit = Units<PackedOf<Cached>>;
  const int dims = values.dims;
  U32 found{};
  for (int unit = values.range.first / Unit::kInputs; unit * Unit::kInputs < values.range.end; ++unit) {
    const Cached* row = values[unit * Unit::kInputs];
    uint32_t* to = panels + static_cast<int64_t>(unit) * kWidth;
    if constexpr (Unit::kInputs == 1) {
      for (int dim = 0; dim < dims; dim += kLanes) {
        const U32 lanes = packing::units_at(row + dim, dims - dim, Unit());
        if (kLook) found |= packing::strange(lanes, Unit());
        std::memcpy(to + dim / kWidth * panel_stride + dim % kWidth, &lanes, kBytes);
      }
    } else {
      const Cached* next = values[unit * Unit::kInputs + 1];
      for (int dim = 0; dim < dims; dim += 2 * kLanes) {
        const U32 a = packing::units_at(row + dim, (dims - dim) / 2, Unit());
        const U32 b = packing::units_at(next + dim, (dims - dim) / 2, Unit());
        if (kLook) found |= packing::strange(a, Unit()) | packing::strange(b, Unit());
        uint32_t* at = to + dim / kWidth * panel_stride + dim % kWidth;
        const U32 low = packing::interleave<0>(a, b), high = packing::interleave<kLanes>(a, b);
        std::memcpy(at, &low, kBytes);
        if (dim + kLanes < dims) std::memcpy(at + kLanes, &high, kBytes);
      }
    }
  }
  return kLook && packing::any(found);
}

}  // namespace catenary
