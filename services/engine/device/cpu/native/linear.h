// A product as one phase of a forward that a team computes.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "mixing.h"
#include "packing.h"
#include "team.h"
#include "tile.h"

namespace catenary {

// What one thread works in: a row that it makes for others, and the attention's scratch.
struct Own {
  Buffer row, attention, best;
};

// So few rows the caller makes alone: that takes less time than to let others help.
constexpr int64_t kOwnRows = 2;

// Puts a row of floats, `made`, into an operand. `scratch` has room for it and may be the same; it is written
// to.
inline void put_made(
    const Linear& linear, const float* made, float* scratch, const Operand& operand, int64_t row) {
  if (linear.kind == WeightKind::kInt8) {
    if (made != scratch) std::memcpy(scratch, made, static_cast<size_t>(linear.inputs) * sizeof(float));
    mix(scratch, linear.inputs);
    made = scratch;
  }
  put_row(linear.kind, made, linear.inputs, operand, row);
}

// Rows for a product. make(row, scratch) gives a row's floats, in `scratch` (one row) or elsewhere. `operand`
// has room for all rows; `owns`: of the team's threads.
template <typename Make>
Operand make_operand(
    Team& team, const Linear& linear, int64_t rows, Operand operand, std::vector<Own>& owns, Make&& make) {
  operand.stride = operand_stride(linear.kind, linear.inputs);
  const auto put = [&](int64_t row, const Hand& hand) {
    float* scratch = owns[static_cast<size_t>(hand.rank)].row.floats(0);
    put_made(linear, make(row, scratch), scratch, operand, row);
  };
  if (rows <= kOwnRows) {
    for (int64_t row = 0; row < rows; ++row) put(row, Hand{});
  } else {
    team.share_runs(rows, put);
  }
  return operand;
}

// Adds what a thread will read of a linear layer to what it foresees. False: nobody knows, since threads
// share panels.
inline bool foresee(const Linear& linear, int64_t rows, int rank, int threads, Prefetch& ahead) {
  const Pieces pieces = divide(linear, rows, threads);
  if (pieces.rows_each < rows) return false;
  const Run run = run_of(pieces.count, rank, threads);
  const int64_t bytes = panel_bytes(linear.kind, linear.inputs), begin = run.begin * pieces.panels_each;
  const int64_t end = std::min<int64_t>(run.end * pieces.panels_each, linear.panel_count());
  const uint8_t* panels = static_cast<const uint8_t*>(linear.panels);
  ahead.add(panels + begin * bytes, (end - begin) * bytes, rows <= tile_functions(linear.kind).once_rows);
  return true;
}

// A product by all threads. result_of(rank): what becomes of it. nth: which it is of those that the threads
// foresee, if they do.
template <typename ResultOf>
void share_product(
    Team& team, const Linear& linear, const Operand& operand, int64_t rows, int64_t nth,
    ResultOf&& result_of) {
  const Pieces pieces = divide(linear, rows, team.size());
  // Copied: threads then find all of it at once.
  team.share_runs(pieces.count, [=, &linear, &result_of](int64_t piece, const Hand& hand) {
    if (hand.first && hand.ahead != nullptr) hand.ahead->begin(nth);
    multiply(linear, operand, rows, pieces, piece, result_of(hand.rank), hand.own ? hand.ahead : nullptr);
  });
}

}  // namespace catenary
