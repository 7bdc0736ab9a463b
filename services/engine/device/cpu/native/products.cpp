// Linear layers: pieces of work, cut into calls of the innermost loops.
#include <algorithm>

#include "packing.h"
#include "results.h"
#include "tile.h"

namespace catenary {

namespace {

// Rows of a block: they stay in the second-level cache while panels pass by. So few rows or less read each
// weight once.
constexpr int64_t kBlockRows = 80;
// Rows that one thread multiplies with all panels: so much of a second-level cache, beside a panel.
constexpr int64_t kBandBytes = 512 << 10;
// A panel's bytes are walked through in parts that stay in the second-level cache, with those of the rows.
constexpr int64_t kPartBytes = 128 << 10;
// The same where a panel is used once: so often it is looked what memory is to be asked for next.
constexpr int64_t kOncePartBytes = 16 << 10;
// Pieces of few rows: long enough that claiming costs nothing, short enough that threads end together.
constexpr int64_t kPieceBytes = 32 << 10;
// How far ahead of the loop memory is asked for when a panel is used once: as far as it takes so long to
// come, and with more rows to compute by then no farther than the hardware looks by itself.
constexpr int64_t kNearBytes = 1 << 10, kFarBytes = 8 << 10, kNearRows = 4;

int64_t ceiling(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// One panel, or of a gated layer the gates' and the ups', times a block of rows.
class Block {
 public:
  Block(
      const Linear& linear, const Operand& operand, const Result& result, int64_t first_row, int64_t rows,
      Prefetch* ahead)
      : linear_(linear),
        operand_(operand),
        result_(result),
        functions_(tile_functions(linear.kind)),
        first_row_(first_row),
        rows_(rows),
        groups_(ceiling(rows, functions_.rows)),
        size_(panel_bytes(linear.kind, linear.inputs)),
        ahead_(ahead),
        add_(ahead != nullptr && rows <= functions_.once_rows ? functions_.once : functions_.by_rows) {}

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
    const int64_t most = groups_ == 1 && ahead_ != nullptr ? kOncePartBytes : kPartBytes;
    const int64_t part = std::max<int64_t>(1, most / functions_.panel_bytes);
    for (int64_t first = 0; first < steps; first += part) {
      const int64_t count = std::min(part, steps - first), bytes = count * functions_.panel_bytes;
      const uint8_t* here = weights + first * functions_.panel_bytes;
      const Wanted wanted = wanted_with(here, bytes);
      for (int64_t group = 0; group < groups_; ++group) {
        const int64_t row = start(group);
        if (rows_ > 1) expect(result_, linear_, {first_row_ + row, start(group + 1) - row, panel});
        add_[start(group + 1) - row - 1](
            {here, count, wanted.from == nullptr ? nullptr : wanted.from + wanted.bytes * group / groups_,
             wanted.bytes / (groups_ * count), first == 0},
            x + row * operand_.stride + first * functions_.row_bytes, operand_.stride,
            sums + row * kTileBytes);
      }
    }
  }

  // Memory that is asked for while a part is computed, each group of rows asking for its share. With many
  // rows there is none: the hardware asks for the next panels in time by itself.
  struct Wanted {
    const uint8_t* from;
    int64_t bytes;
  };
  Wanted wanted_with(const uint8_t* here, int64_t bytes) const {
    if (ahead_ != nullptr) {
      ahead_->reads(bytes);
      const Prefetch::Part part = ahead_->take(bytes);
      return {part.from, part.bytes};
    }
    if (groups_ == 1) return {here + (rows_ <= kNearRows ? kNearBytes : kFarBytes), bytes};
    return {nullptr, 0};
  }

  const Linear& linear_;
  const Operand& operand_;
  const Result& result_;
  const TileFunctions functions_;
  const int64_t first_row_, rows_, groups_, size_;
  Prefetch* const ahead_;
  const TileFunction* const add_;
  alignas(64) uint8_t sums_[2][kBlockRows * kTileBytes];
};

}  // namespace

Pieces divide(const Linear& linear, int64_t rows, int threads) {
  if (rows < 1) return {0, 1, 1, 1};
  const int64_t width = linear.gated ? 2 : 1;
  const int64_t units = linear.panel_count() / width;
  const int64_t bytes = width * panel_bytes(linear.kind, linear.inputs);
  // Of many rows each thread has its own, so that they and their results stay in its caches.
  int64_t bands = 1;
  if (rows > kBlockRows) {
    const int64_t stride = operand_stride(linear.kind, linear.inputs);
    const int64_t most = std::max<int64_t>(kBlockRows, kBandBytes / stride);
    bands = ceiling(ceiling(rows, most), threads) * threads;
  }
  const int64_t blocks = ceiling(ceiling(rows, bands), kBlockRows);
  int64_t each = std::max<int64_t>(1, kPieceBytes / bytes);
  // All threads get something to do.
  each = std::max<int64_t>(1, std::min(each, units * bands * blocks / (4 * std::max(threads, 1))));
  return {bands * blocks * ceiling(units, each), static_cast<int32_t>(each * width),
          static_cast<int32_t>(ceiling(rows, bands * blocks)), static_cast<int32_t>(blocks)};
}

void multiply(
    const Linear& linear, const Operand& operand, int64_t rows, const Pieces& pieces, int64_t piece,
    const Result& result, Prefetch* ahead) {
  // Pieces that follow one another have the same panels and other rows of a band: both then stay near.
  const int64_t blocks = pieces.blocks_each;
  const int64_t of_band = ceiling(linear.panel_count(), pieces.panels_each) * blocks;
  const int64_t within = piece % of_band;
  const int64_t first_row = (piece / of_band * blocks + within % blocks) * pieces.rows_each;
  if (first_row >= rows) return;
  const int64_t first = within / blocks * pieces.panels_each;
  const int64_t end = std::min(first + pieces.panels_each, linear.panel_count());
  const int64_t count = std::min<int64_t>(pieces.rows_each, rows - first_row);
  Block block(linear, operand, result, first_row, count, ahead);
  for (int64_t panel = first; panel < end; panel += linear.gated ? 2 : 1) block.compute(panel);
}

}  // namespace catenary
