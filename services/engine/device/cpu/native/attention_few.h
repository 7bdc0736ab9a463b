// Attention of one token: few rows, so keys and values are multiplied on their way from the cache, packed
// nowhere.
//
// Each sum goes over the same units in the same order as in the products of many rows: the results are the
// same.
#pragma once

#include "attention_packing.h"

namespace catenary {

// Scores of kRows rows of queries, `units` each, for one vector of positions.
template <int kRows, typename Cached>
void score_vector(const ChunkRows<Cached>& keys, int position, const uint32_t* queries, int units,
                  float* scores, int64_t stride) {
  using Unit = Units<PackedOf<Cached>>;
  const Cached* rows[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rows[lane] = keys[position + lane];
  F32 acc[kRows] = {};
  const auto multiply = [&](int unit, U32 lanes) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      acc[row] = Unit::multiply(acc[row], splat_unit(queries + row * units + unit), lanes);
    }
  };
  for (int unit = 0; unit < units; unit += kLanes) {
    U32 lanes[kLanes];
    packing::load_transposed(rows, unit, units, lanes);
    if (units - unit >= kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) multiply(unit + i, lanes[i]);
    } else {
      for (int i = 0; i < units - unit; ++i) multiply(unit + i, lanes[i]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) store(scores + row * stride + position, acc[row]);
}

// Vectors of values from `dim` on, at the positions of one unit.
template <int kColumns, typename Cached>
inline void load_columns(const ChunkRows<Cached>& values, int unit, int dim, U32* columns) {
  using Unit = Units<PackedOf<Cached>>;
  if constexpr (Unit::kInputs == 1) {
    const Cached* row = values[unit] + dim;
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i) {
      columns[i] = packing::units_at(row + i * kLanes, values.dims - dim - i * kLanes, Unit());
    }
  } else {
    const Cached* row = values[2 * unit] + dim;
    const Cached* next = values[2 * unit + 1] + dim;
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; i += 2) {
      const int left = (values.dims - dim - i * kLanes) / 2;
      const U32 a = packing::units_at(row + i * kLanes, left, Unit());
      const U32 b = packing::units_at(next + i * kLanes, left, Unit());
      columns[i] = packing::interleave<0>(a, b);
      if (i + 1 < kColumns) columns[i + 1] = packing::interleave<kLanes>(a, b);
    }
  }
}

// Adds values of units [first, end), from `dim` on, to kRows rows of sums, weighted by as many rows of
// weights.
template <int kRows, int kColumns, typename Cached>
void sum_columns(const ChunkRows<Cached>& values, int first, int end, int dim, const uint32_t* weights,
                 int64_t weight_stride, float* sums, int64_t stride) {
  F32 acc[kRows][kColumns];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i) acc[row][i] = load(sums + row * stride + dim + i * kLanes);
  }
  for (int unit = first; unit < end; ++unit) {
    U32 columns[kColumns];
    load_columns<kColumns>(values, unit, dim, columns);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const U32 weight = splat_unit(weights + row * weight_stride + unit);
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; ++i) {
        acc[row][i] = Units<PackedOf<Cached>>::multiply(acc[row][i], weight, columns[i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i) store(sums + row * stride + dim + i * kLanes, acc[row][i]);
  }
}

template <int kRows, int kColumns, typename Cached>
void sum_exactly(int columns, const ChunkRows<Cached>& values, int first, int end, int dim,
                 const uint32_t* weights, int64_t weight_stride, float* sums, int64_t stride) {
  if constexpr (kColumns > 1) {
    if (columns < kColumns) {
      return sum_exactly<kRows, kColumns - 1>(columns, values, first, end, dim, weights, weight_stride, sums,
                                              stride);
    }
  }
  sum_columns<kRows, kColumns>(values, first, end, dim, weights, weight_stride, sums, stride);
}

// Scores [rows, stride] of queries [rows, units] at positions [first, end), in whole vectors.
template <typename Cached, int kRows = kRegisterRows>
void score_few(int rows, const ChunkRows<Cached>& keys, int first, int end, const uint32_t* queries,
               int units, float* scores, int64_t stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return score_few<Cached, kRows - 1>(rows, keys, first, end, queries, units, scores, stride);
    }
  }
  for (int position = first; position < end; position += kLanes) {
    score_vector<kRows>(keys, position, queries, units, scores, stride);
  }
}

// Adds the values at positions [first, end) to sums [rows, stride], by weights [rows, weight_stride] in
// units.
template <typename Cached, int kRows = kRegisterRows>
void sum_few(int rows, const ChunkRows<Cached>& values, int first, int end, const uint32_t* weights,
             int64_t weight_stride, float* sums, int64_t stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return sum_few<Cached, kRows - 1>(rows, values, first, end, weights, weight_stride, sums, stride);
    }
  }
  constexpr int kInputs = Units<PackedOf<Cached>>::kInputs;
  for (int dim = 0; dim < values.dims; dim += kWidth) {
    const int columns = std::min(kRegisterColumns, (values.dims - dim + kLanes - 1) / kLanes);
    sum_exactly<kRows, kRegisterColumns>(columns, values, first / kInputs, (end + kInputs - 1) / kInputs, dim,
                                         weights, weight_stride, sums, stride);
  }
}

}  // namespace catenary
