// What becomes of sums: products, and they what the layer's result is.
#pragma once

#include "tile.h"

namespace catenary {

// Where sums belong: rows [row, row + rows) of the batch, and the outputs of a panel.
struct Place {
  int64_t row;
  int64_t rows;
  int64_t panel;
};

// Asks for the memory that the result of `place` goes to, while its sums are computed.
void expect(const Result& result, const Linear& linear, const Place& place);

// Writes the result of the sums of `place`, kTileBytes for each row; `ups` are those of the next panel, of a
// gated layer.
void finish(
    const Linear& linear, const Operand& operand, const Result& result, const Place& place,
    const uint8_t* sums, const uint8_t* ups);

}  // namespace catenary
