// What the parts of the packing share.
#pragma once

#include "kernels.h"

namespace catenary {

// A group within an int4 panel: brain floats of each output's scale and offset, then two inputs to a byte.
constexpr int64_t kGroupScaleBytes = kPanel * 2;
constexpr int64_t kGroupBytes = 2 * kGroupScaleBytes + kPanel * kGroup / 2;

// A group within an operand row for int4: brain floats and, in a float, their sum.
constexpr int64_t kGroupRowBytes = kGroup * 2 + 4;

// Bytes of one panel.
int64_t panel_bytes(WeightKind kind, int32_t inputs);

// The rows of one panel: `rows` [count, inputs] with count at most kPanel, other outputs are zero.
void pack_int4_panel(const float* rows, int32_t count, int32_t inputs, uint8_t* panel);

}  // namespace catenary
