// Linear layers: pieces of work, cut into calls of the innermost loops.
#include <algorithm>

#include "packing.h"
#include "results.h"
#include "tile.h"

namespace catenary {

namespace {

// Rows of a block: they stay in the second-level cache while panels pass by. So few rows or less read each weight once.
constexpr int64_t kBlockRows = 80;
// A panel's bytes are walked through in parts that stay in the second-level cache, with those of the rows.
constexpr int64_t kPartBytes = 128 << 10;
// Pieces of few rows: long enough that claiming costs nothing, short enough that threads end together.
constexpr int64_t kPieceBytes = 32 << 10;

int64_t ceiling(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// One panel, or of a gated layer the gates' and the ups', times a block of rows.
class Block {
 public:
  Block(const Linear& linear, const Operand& operand, const Result& result, int64_t first_row, int64_t rows)
      : linear_(linear),
        operand_(operand),
        result_(result),
        functions_(tile_functions(linear.kind)),
        first_row_(first_row),
        rows_(rows),
        groups_(ceiling(rows, functions_.rows)),
        size_(panel_bytes(linear.kind, linear.inputs)) {}

  void compute(int64_t panel) {
    sum(panel, sums_[0]);
    if (linear_.gated) sum(panel + 1, sums_[1]);
    finish(linear_, operand_, result_, {first_row_, rows_, panel}, sums_[0], sums_[1]);
  }

 private:
  // Rows are computed in groups, all of one size or nearly.
  int64_t start(int64_t group) const { return rows_ * group / groups_; }

  void sum(int64_t panel, uint8_t* sums) {
    const uint8_t* weights = static_cast<const uint8_t*>(linear_.panels) + panel * size_;
    const uint8_t* x = static_cast<const uint8_t*>(operand_.data) + first_row_ * operand_.stride;
    const int64_t steps = size_ / functions_.panel_bytes;
    const int64_t part = std::max<int64_t>(1, kPartBytes / functions_.panel_bytes);
    std::memset(sums, 0, rows_ * kTileBytes);
    for (int64_t first = 0; first < steps; first += part) {
      const int64_t count = std::min(part, steps - first), bytes = count * functions_.panel_bytes;
      const uint8_t* here = weights + first * functions_.panel_bytes;
      for (int64_t group = 0; group < groups_; ++group) {
        const int64_t row = start(group);
        // Memory brings the next part while this one is computed, each group asking for its share.
        const uint8_t* ahead = here + bytes + bytes * group / groups_;
        if (rows_ > 1) expect(result_, linear_, {first_row_ + row, start(group + 1) - row, panel});
        functions_.by_rows[start(group + 1) - row - 1](
            {here, count, ahead, functions_.panel_bytes / groups_},
            x + row * operand_.stride + first * functions_.row_bytes, operand_.stride, sums + row * kTileBytes);
      }
    }
  }

  const Linear& linear_;
  const Operand& operand_;
  const Result& result_;
  const TileFunctions functions_;
  const int64_t first_row_, rows_, groups_, size_;
  alignas(64) uint8_t sums_[2][kBlockRows * kTileBytes];
};

}  // namespace

Pieces divide(const Linear& linear, int64_t rows, int threads) {
  if (rows < 1) return {0, 1, 1};
  const int64_t width = linear.gated ? 2 : 1;
  const int64_t units = linear.panel_count() / width;
  const int64_t blocks = ceiling(rows, kBlockRows);
  const int64_t bytes = width * panel_bytes(linear.kind, linear.inputs);
  int64_t each = std::max<int64_t>(1, kPieceBytes / bytes);
  // All threads get something to do.
  each = std::max<int64_t>(1, std::min(each, units * blocks / (4 * std::max(threads, 1))));
  const int64_t rows_each = ceiling(rows, blocks);
  return {ceiling(rows, rows_each) * ceiling(units, each), static_cast<int32_t>(each * width),
          static_cast<int32_t>(rows_each)};
}

void multiply(
    const Linear& linear, const Operand& operand, int64_t rows, const Pieces& pieces, int64_t piece,
    const Result& result) {
  // Pieces that follow one another have the same panels: while one thread computes some rows with them another does
  // others, and memory is read once.
  const int64_t blocks = ceiling(rows, pieces.rows_each);
  const int64_t first_row = piece % blocks * pieces.rows_each;
  const int64_t first = piece / blocks * pieces.panels_each;
  const int64_t end = std::min(first + pieces.panels_each, linear.panel_count());
  Block block(linear, operand, result, first_row, std::min<int64_t>(pieces.rows_each, rows - first_row));
  for (int64_t panel = first; panel < end; panel += linear.gated ? 2 : 1) block.compute(panel);
}

}  // namespace catenary
