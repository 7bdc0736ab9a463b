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

// Makes products of one vector of outputs from sums; `output` counts in panels.
class Products {
 public:
  Products(const Linear& linear, int64_t output)
      : quantized_(linear.kind == WeightKind::kInt8), biased_(linear.bias != nullptr) {
    if (quantized_) {
      // Activations are bytes 128 above what they stand for.
      shift_ = 128 * load_as<I32>(linear.sums + output);
      scales_ = load(linear.scales + output);
    }
    if (biased_) bias_ = load(linear.bias + output);
  }

  F32 of(const Operand& operand, int64_t row, const uint8_t* sums) const {
    const F32 value = quantized_ ? to_floats(load_as<I32>(sums) - shift_) * (operand.scales[row] * scales_)
                                 : load_as<F32>(sums);
    return biased_ ? value + bias_ : value;
  }

 private:
  const bool quantized_, biased_;
  I32 shift_{};
  F32 scales_{}, bias_{};
};

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

// Lanes from the first on, as numbers.
I32 lane_numbers() {
  I32 numbers{};
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// Keeps of each lane what is the best yet. outputs: the lanes' numbers, of which those below `end` are
// outputs.
void keep(F32 value, I32 outputs, int32_t end, float* kept) {
  const I32 inside = outputs < end;
  const F32 best = load(kept);
  I32 places = load_as<I32>(kept + kLanes);
  // A thread takes panels in any order: of equal ones the first is the best.
  const I32 better = ((value > best) | ((value == best) & (outputs < places))) & inside;
  store(kept, better ? value : best);
  places = better ? outputs : places;
  std::memcpy(kept + kLanes, &places, sizeof places);
  const I32 strange = load_as<I32>(kept + 2 * kLanes) | ((value != value) & inside);
  std::memcpy(kept + 2 * kLanes, &strange, sizeof strange);
}

}  // namespace

void expect(const Result& result, const Linear& linear, const Place& place) {
  if (result.way == Result::Way::kBest) return;
  const int64_t column = first_column(result, place);
  const int64_t width = std::min<int64_t>(kPanel, columns_of(result, linear) - column);
  for (int64_t row = place.row; row < place.row + place.rows; ++row)
    for (int64_t i = 0; i < width; i += kLineFloats) {
      __builtin_prefetch(result.out + row * result.stride + column + i, 1);
    }
}

void finish(
    const Linear& linear, const Operand& operand, const Result& result, const Place& place,
    const uint8_t* sums, const uint8_t* ups) {
  const int64_t columns = columns_of(result, linear), first = first_column(result, place);
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t column = first + half * kLanes, output = place.panel * kPanel + half * kLanes;
    if (column >= columns) break;
    const Products products(linear, output);
    const auto for_rows = [&](auto&& work) {
      for (int64_t row = 0; row < place.rows; ++row) {
        const int64_t at = row * kTileBytes + half * kBytes;
        float* out = result.out + (place.row + row) * result.stride;
        work(products.of(operand, place.row + row, sums + at), at, out);
      }
    };
    if (result.way == Result::Way::kBest) {
      const I32 outputs = lane_numbers() + static_cast<int32_t>(column);
      for_rows([&](F32 value, int64_t, float* out) {
        keep(value, outputs, static_cast<int32_t>(columns), out);
      });
    } else if (result.way == Result::Way::kGate) {
      const Products of_ups(linear, output + kPanel);
      for_rows([&](F32 value, int64_t at, float* out) {
        const int64_t row = at / kTileBytes;
        value = activate(result.activation, value) * of_ups.of(operand, place.row + row, ups + at);
        write(result, value, out + column, columns - column);
      });
    } else {
      for_rows([&](F32 value, int64_t, float* out) { write(result, value, out + column, columns - column); });
    }
  }
}

}  // namespace catenary
