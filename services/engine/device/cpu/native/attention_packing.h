// Keys and values of a chunk of positions, brought from their slots into the panels that the products want.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_products.h"
#include "simd.h"

namespace catenary {

// What is multiplied as pairs, and what as floats.
template <typename Cached>
using PackedOf = std::conditional_t<std::is_same_v<Cached, Bf16> && kMultipliesPairs, Bf16, float>;

constexpr int kMostDims = 256;

// Keys or values of one kv head at the positions of a chunk. Those outside of [first, end) are zero: nobody sees them,
// and their slots may hold anything.
template <typename Cached>
struct ChunkRows {
  const Cached* cache;
  int64_t stride;
  const int64_t* slots;
  int first;
  int end;

  const Cached* operator[](int position) const {
    return position < first || position >= end ? kZeros : cache + slots[position] * stride;
  }

 private:
  alignas(64) static constexpr Cached kZeros[kMostDims] = {};
};

namespace packing {

// A vector of units of a row, zeros beyond `count` units.
inline U32 units_at(const Bf16* row, int count, Units<Bf16>) {
  return count >= kLanes ? load_pairs(row) : load_first(row, count);
}

inline U32 units_at(const float* row, int count, Units<float>) {
  return count >= kLanes ? load_as<U32>(row) : load_first(row, count);
}

inline U32 units_at(const Bf16* row, int count, Units<float>) {
  if (count >= kLanes) return bits_as<U32>(load(row));
  const U32 pairs = load_first(row, count / 2);
  U16 halves;
  std::memcpy(&halves, &pairs, sizeof halves);
  return bits_as<U32>(widen(halves));
}

// One step of a transposition: swaps the lanes of `a` that have the bit kBit with those of `b` that have it not.
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

typedef uint16_t Halves __attribute__((vector_size(kBytes)));

// Halves of two vectors in turn: the first halves of both, and so on; kFrom: 0, or kLanes for those of the upper parts.
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
void pack_keys(const ChunkRows<Cached>& rows, int units, uint32_t* panels) {
  using Unit = Units<PackedOf<Cached>>;
  for (int position = rows.first / kLanes * kLanes; position < rows.end; position += kLanes) {
    uint32_t* to = panels + static_cast<int64_t>(position / kWidth) * units * kWidth + position % kWidth;
    const Cached* row[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) row[lane] = rows[position + lane];
    for (int unit = 0; unit < units; unit += kLanes) {
      U32 lanes[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = packing::units_at(row[lane] + unit * Unit::kInputs, units - unit, Unit());
      }
      packing::transpose(lanes);
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

// Values as panels [positions in units][kWidth dims], `panel_stride` units each. Tells whether a number among them is
// infinite or none, if kLook.
template <bool kLook, typename Cached>
bool pack_values(const ChunkRows<Cached>& rows, int dims, int64_t panel_stride, uint32_t* panels) {
  using Unit = Units<PackedOf<Cached>>;
  U32 found{};
  for (int unit = rows.first / Unit::kInputs; unit * Unit::kInputs < rows.end; ++unit) {
    const Cached* row = rows[unit * Unit::kInputs];
    uint32_t* to = panels + static_cast<int64_t>(unit) * kWidth;
    if constexpr (Unit::kInputs == 1) {
      for (int dim = 0; dim < dims; dim += kLanes) {
        const U32 lanes = packing::units_at(row + dim, dims - dim, Unit());
        if (kLook) found |= packing::strange(lanes, Unit());
        std::memcpy(to + dim / kWidth * panel_stride + dim % kWidth, &lanes, kBytes);
      }
    } else {
      const Cached* next = rows[unit * Unit::kInputs + 1];
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
