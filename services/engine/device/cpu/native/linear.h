// A product as one phase of a forward that a team computes.
#pragma once

#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "kernels.h"
#include "mixing.h"
#include "packing.h"
#include "team.h"
#include "tile.h"

namespace catenary {

// What one thread works in: rows that it makes for itself, and the attention's scratch.
struct Own {
  Buffer row, operand, scales, attention, best;
  Ahead ahead;
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
    worker.share_runs(rows, [&](int64_t row, bool) { put(row); });
  }
  return operand;
}

// Adds what a thread will read of a linear layer to what it foresees. False: nobody knows, since threads share panels.
inline bool foresee(const Linear& linear, int64_t rows, int rank, int threads, Ahead& ahead) {
  const Pieces pieces = divide(linear, rows, threads);
  if (pieces.rows_each < rows) return false;
  const Run run = run_of(pieces.count, rank, threads);
  const int64_t bytes = panel_bytes(linear.kind, linear.inputs), begin = run.begin * pieces.panels_each;
  const int64_t end = std::min<int64_t>(run.end * pieces.panels_each, linear.panel_count());
  const uint8_t* panels = static_cast<const uint8_t*>(linear.panels);
  ahead.add(panels + begin * bytes, (end - begin) * bytes, rows <= tile_functions(linear.kind).once_rows);
  return true;
}

// The next product of those that the worker foresees, or any product if it foresees nothing.
inline void share_product(
    Worker& worker, const Linear& linear, const Operand& operand, int64_t rows, const Result& result) {
  const Pieces pieces = divide(linear, rows, worker.threads());
  Ahead* ahead = worker.ahead();
  if (ahead == nullptr) {
    worker.share_runs(
        pieces.count, [&](int64_t piece, bool) { multiply(linear, operand, rows, pieces, piece, result, nullptr); });
    return;
  }
  ahead->begin();
  worker.share_runs(pieces.count, [&](int64_t piece, bool own) {
    multiply(linear, operand, rows, pieces, piece, result, own ? ahead : nullptr);
  });
}

}  // namespace catenary
