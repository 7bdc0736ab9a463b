#include "results.h"

#include <algorithm>

namespace catenary {

namespace {

// Floats of one line of the caches.
constexpr int64_t kLineFloats = 16;

int64_t columns_of(const Result& result, const Linear& linear) {
  return result.way == Result::Way::kGate ? linear.outputs / 2 : linear.outputs;
}

int64_t first_column(const Result& result, const Place& place) {
  return (result.way == Result::Way::kGate ? place.panel / 2 : place.panel) * kPanel;
}

// A vector of products of a row, from its sums; `output` counts in panels.
F32 product(const Linear& linear, const Operand& operand, int64_t row, int64_t output, const uint8_t* sums) {
  F32 value;
  if (linear.kind == WeightKind::kInt8) {
    // Activations are bytes 128 above what they stand for.
    const I32 whole = load_as<I32>(sums) - 128 * load_as<I32>(linear.sums + output);
    value = to_floats(whole) * (operand.scales[row] * load(linear.scales + output));
  } else {
    value = load_as<F32>(sums);
  }
  return linear.bias == nullptr ? value : value + load(linear.bias + output);
}

// Writes the first `count` lanes.
void write(const Result& result, F32 value, float* out, int64_t count) {
  if (count >= kLanes) {
    store(out, result.way == Result::Way::kAdd ? fma(splat(result.factor), value, load(out)) : value);
    return;
  }
  F32 old = F32{};
  if (result.way == Result::Way::kAdd) {
    std::memcpy(&old, out, count * sizeof(float));
    value = fma(splat(result.factor), value, old);
  }
  std::memcpy(out, &value, count * sizeof(float));
}

// Keeps of each lane what is the best yet; `count` lanes are outputs, from `column` on.
void keep(F32 value, int64_t column, int64_t count, float* kept) {
  I32 outputs = I32{} + static_cast<int32_t>(column), inside = I32{} - 1;
  for (int lane = 0; lane < kLanes; ++lane) {
    outputs[lane] += lane;
    if (lane >= count) inside[lane] = 0;
  }
  const F32 best = load(kept);
  const I32 better = (value > best) & inside;
  store(kept, better ? value : best);
  outputs = better ? outputs : load_as<I32>(kept + kLanes);
  std::memcpy(kept + kLanes, &outputs, sizeof outputs);
  const I32 strange = load_as<I32>(kept + 2 * kLanes) | ((value != value) & inside);
  std::memcpy(kept + 2 * kLanes, &strange, sizeof strange);
}

}  // namespace

void expect(const Result& result, const Linear& linear, const Place& place) {
  if (result.way == Result::Way::kBest) return;
  const int64_t column = first_column(result, place);
  const int64_t width = std::min<int64_t>(kPanel, columns_of(result, linear) - column);
  for (int64_t row = place.row; row < place.row + place.rows; ++row)
    for (int64_t i = 0; i < width; i += kLineFloats) __builtin_prefetch(result.out + row * result.stride + column + i, 1);
}

void finish(
    const Linear& linear, const Operand& operand, const Result& result, const Place& place, const uint8_t* sums,
    const uint8_t* ups) {
  const bool gate = result.way == Result::Way::kGate;
  const int64_t columns = columns_of(result, linear), first = first_column(result, place);
  for (int64_t row = 0; row < place.rows; ++row)
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t column = first + half * kLanes, output = place.panel * kPanel + half * kLanes;
      if (column >= columns) continue;
      const int64_t at = row * kTileBytes + half * kBytes;
      F32 value = product(linear, operand, place.row + row, output, sums + at);
      if (gate)
        value = activate(result.activation, value) *
                product(linear, operand, place.row + row, output + kPanel, ups + at);
      float* out = result.out + (place.row + row) * result.stride;
      if (result.way == Result::Way::kBest) {
        keep(value, column, columns - column, out);
      } else {
        write(result, value, out + column, columns - column);
      }
    }
}

}  // namespace catenary
