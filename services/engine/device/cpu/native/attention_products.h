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

// What is multiplied: `rows` of units, `stride` units from one to the next, and panels
// [panels][units][kWidth], `panel_stride` units from one to the next.
struct Factors {
  const uint32_t* rows;
  int64_t row_stride;
  const uint32_t* panels;
  int64_t panel_stride;
};

template <typename Packed, int kRows, int kColumns>
void multiply_registers(const uint32_t* rows, int64_t row_stride, const uint32_t* panel, int units,
                        float* out, int64_t out_stride) {
  F32 acc[kRows][kColumns] = {};
  for (int unit = 0; unit < units; ++unit) {
    U32 b[kColumns];
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column) b[column] = load_as<U32>(panel + column * kLanes);
    panel += kWidth;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const U32 a = U32{} + rows[row * row_stride + unit];
#pragma GCC unroll 8
      for (int column = 0; column < kColumns; ++column) {
        acc[row][column] = Units<Packed>::multiply(acc[row][column], a, b[column]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column) {
      store(out + row * out_stride + column * kLanes, acc[row][column]);
    }
  }
}

// Calls the kernel of exactly `columns` vectors.
template <typename Packed, int kRows, int kColumns = kRegisterColumns>
void multiply_columns(int columns, const uint32_t* rows, int64_t row_stride, const uint32_t* panel, int units,
                      float* out, int64_t out_stride) {
  if constexpr (kColumns > 1) {
    if (columns < kColumns) {
      multiply_columns<Packed, kRows, kColumns - 1>(columns, rows, row_stride, panel, units, out, out_stride);
      return;
    }
  }
  multiply_registers<Packed, kRows, kColumns>(rows, row_stride, panel, units, out, out_stride);
}

template <typename Packed, int kRows = kRegisterRows>
void multiply_rows(int count, int columns, const uint32_t* rows, int64_t row_stride, const uint32_t* panel,
                   int units, float* out, int64_t out_stride) {
  if constexpr (kRows > 1) {
    if (count < kRows) {
      multiply_rows<Packed, kRows - 1>(count, columns, rows, row_stride, panel, units, out, out_stride);
      return;
    }
  }
  multiply_columns<Packed, kRows>(columns, rows, row_stride, panel, units, out, out_stride);
}

// out [count, columns] = rows [count, units] times columns [first, end) of the panels, first a multiple of
// kWidth. Whole vectors are computed. Each sum goes over the units in turn, however many rows and columns
// there are beside it.
template <typename Packed>
void multiply_panels(const Factors& factors, int count, int units, int first, int end, float* out,
                     int64_t out_stride) {
  for (int column = first; column < end; column += kWidth) {
    const int vectors = std::min(kRegisterColumns, (end - column + kLanes - 1) / kLanes);
    const uint32_t* panel = factors.panels + column / kWidth * factors.panel_stride;
    for (int row = 0; row < count; row += kRegisterRows) {
      multiply_rows<Packed>(std::min(kRegisterRows, count - row), vectors,
                            factors.rows + row * factors.row_stride, factors.row_stride, panel, units,
                            out + row * out_stride + column, out_stride);
    }
  }
}

}  // namespace catenary
