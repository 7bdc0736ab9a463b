// The two products of attention, of tiles that lie in the cache of one core.
//
// Both operands are made of units of four bytes, one float or two brain floats, along the dimension that is
// summed.
#pragma once

#include <algorithm>

#include "simd.h"

namespace catenary {

// Columns of one panel: as many accumulators as the registers hold, beside one vector of the panel each and a
// row's unit.
constexpr int kRegisterRows = 6;
constexpr int kRegisterColumns = kLanes == 16 ? 4 : 2;
constexpr int kWidth = kRegisterColumns * kLanes;

template <typename Packed>
struct Units;

template <>
struct Units<float> {
  static constexpr int kInputs = 1;
  static F32 multiply(F32 acc, U32 a, U32 b) { return fma(bits_as<F32>(a), bits_as<F32>(b), acc); }
};

template <>
struct Units<Bf16> {
  static constexpr int kInputs = 2;
  static F32 multiply(F32 acc, U32 a, U32 b) { return dot_pairs(acc, a, b); }
};

// Rows of a block stand beside one another in vectors: so what is done with them is the same for each lane.
// So many vectors, and places (positions or dimensions) whose sums are in registers together.
constexpr int kRowVectors = 2;
constexpr int kBlockRows = kRowVectors * kLanes;
constexpr int kRegisterPlaces = kLanes == 16 ? 8 : 4;

static_assert(kWidth % kRegisterPlaces == 0);

// out [kRegisterPlaces][kBlockRows] = sums over the units of a panel's units [units][kWidth], of which
// kRegisterPlaces beside one another are taken, times rows [units][kBlockRows].
template <typename Packed>
void multiply_places(const uint32_t* panel, int units, const uint32_t* rows, float* out) {
  F32 acc[kRegisterPlaces][kRowVectors] = {};
  for (int unit = 0; unit < units; ++unit) {
    U32 lanes[kRowVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kRowVectors; ++i) lanes[i] = load_as<U32>(rows + i * kLanes);
#pragma GCC unroll 8
    for (int place = 0; place < kRegisterPlaces; ++place) {
      const U32 spread = splat_unit(panel + place);
#pragma GCC unroll 4
      for (int i = 0; i < kRowVectors; ++i) {
        acc[place][i] = Units<Packed>::multiply(acc[place][i], spread, lanes[i]);
      }
    }
    rows += kBlockRows;
    panel += kWidth;
  }
#pragma GCC unroll 8
  for (int place = 0; place < kRegisterPlaces; ++place) {
#pragma GCC unroll 4
    for (int i = 0; i < kRowVectors; ++i) store(out + place * kBlockRows + i * kLanes, acc[place][i]);
  }
}

// out [places][kBlockRows], of places [first, end) of panels `stride` units from one to the next, and of
// those beside them that are computed with them. Each sum goes over the units in turn, whatever is beside it.
template <typename Packed>
void multiply_block(const uint32_t* panels, int64_t stride, int units, int first, int end,
                    const uint32_t* rows, float* out) {
  for (int place = first / kRegisterPlaces * kRegisterPlaces; place < end; place += kRegisterPlaces) {
    multiply_places<Packed>(panels + place / kWidth * stride + place % kWidth, units, rows,
                            out + static_cast<int64_t>(place) * kBlockRows);
  }
}

}  // namespace catenary
