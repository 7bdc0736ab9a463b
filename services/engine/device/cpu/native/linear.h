// A product as one phase of a forward that a team computes.
#pragma once

#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "kernels.h"
#include "mixing.h"
#include "team.h"

namespace catenary {

// What one thread works in: rows that it makes for itself, and the attention's scratch.
struct Own {
  Buffer row, operand, scales, attention;
};

// So few rows every thread makes for itself: that takes less time than to wait for another that makes them.
constexpr int64_t kOwnRows = 2;

// Puts a row of floats, `made`, into an operand. `scratch` has room for it and may be the same; it is written to.
inline void put_made(const Linear& linear, const float* made, float* scratch, const Operand& operand, int64_t row) {
  if (linear.kind == WeightKind::kInt8) {
    if (made != scratch) std::memcpy(scratch, made, static_cast<size_t>(linear.inputs) * sizeof(float));
    mix(scratch, linear.inputs);
    made = scratch;
  }
  put_row(linear.kind, made, linear.inputs, operand, row);
}

// Rows for a product. make(row, scratch) gives a row's floats, in `scratch` (one row) or elsewhere; every thread of
// the team calls this. `shared` has room for all rows.
template <typename Make>
Operand make_operand(
    Worker& worker, const Linear& linear, int64_t rows, const Operand& shared, Own& own, Make&& make) {
  Operand operand = shared;
  operand.stride = operand_stride(linear.kind, linear.inputs);
  float* scratch = own.row.floats(0);
  const auto put = [&](int64_t row) { put_made(linear, make(row, scratch), scratch, operand, row); };
  if (rows <= kOwnRows) {
    operand.data = own.operand.reserve(0);
    operand.scales = own.scales.floats(0);
    for (int64_t row = 0; row < rows; ++row) put(row);
  } else {
    worker.share(rows, put);
  }
  return operand;
}

inline void share_product(
    Worker& worker, const Linear& linear, const Operand& operand, int64_t rows, int threads, const Result& result) {
  const Pieces pieces = divide(linear, rows, threads);
  worker.share(pieces.count, [&](int64_t piece) { multiply(linear, operand, rows, pieces, piece, result); });
}

}  // namespace catenary
