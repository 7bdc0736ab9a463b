// What the parts of the packing share.
#pragma once

#include "kernels.h"

namespace catenary {

// Bytes of one panel of a kind, and of a group within an int4 panel: a brain float for each output's scale, then two
// inputs to a byte.
constexpr int64_t kGroupBytes = kPanel * 2 + kPanel * kGroup / 2;
int64_t panel_bytes(WeightKind kind, int32_t inputs);

// The rows of one panel: `rows` [count, inputs] with count at most kPanel, other outputs are zero.
void pack_int4_panel(const float* rows, int32_t count, int32_t inputs, uint8_t* panel);

}  // namespace catenary
