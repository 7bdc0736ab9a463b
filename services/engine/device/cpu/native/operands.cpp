// The rows that linear layers multiply, made from float32 as each kind of weight wants them.
#include "packing.h"

namespace catenary {

namespace {

constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void put_floats(const float* x, int32_t inputs, float* out, int64_t padded) {
  std::memcpy(out, x, inputs * sizeof(float));
  for (int64_t i = inputs; i < padded; ++i) out[i] = 0;
}

void put_brain_floats(const float* x, int32_t inputs, Bf16* out, int64_t padded) {
  int32_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) store(out + i, load(x + i));
  for (; i < inputs; ++i) from_float(x[i], out + i);
  for (; i < padded; ++i) out[i].bits = 0;
}

// Groups of brain floats, each with its sum behind it.
void put_groups(const float* x, int32_t inputs, uint8_t* out) {
  for (int32_t first = 0; first < inputs; first += kGroup, out += kGroupRowBytes) {
    Bf16* group = reinterpret_cast<Bf16*>(out);
    put_brain_floats(x + first, inputs - first < kGroup ? inputs - first : kGroup, group, kGroup);
    F32 total = F32{};
    for (int i = 0; i < kGroup; i += kLanes) total += load(group + i);
    const float whole = sum(total);
    std::memcpy(group + kGroup, &whole, sizeof whole);
  }
}

// The largest magnitude of a row; no number if the row has a value that is none, or none that is finite.
float magnitude(const float* x, int32_t inputs) {
  F32 most = F32{}, strange = F32{};
  int32_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    const F32 value = load(x + i);
    most = max(most, max(value, -value));
    strange += value * 0.0f;
  }
  float largest_yet = largest(most), none = sum(strange);
  for (; i < inputs; ++i) {
    const float size = x[i] < 0 ? -x[i] : x[i];
    largest_yet = largest_yet < size ? size : largest_yet;
    none += x[i] * 0.0f;
  }
  return largest_yet + none;
}

// Adding this rounds a small float to the nearest whole number, ties to even, and leaves that in its lowest
// bits.
constexpr float kRounder = 12582912.0f;

uint8_t to_byte(float scaled) { return static_cast<uint8_t>(bits_as<uint32_t>(scaled + kRounder) + 128); }

// A row's scale is its own, so that no row depends on its neighbours. A row with a value that is no number,
// or not finite, gets a scale that is none, and so are all of its products.
float put_bytes(const float* x, int32_t inputs, uint8_t* out, int64_t padded) {
  const float most = magnitude(x, inputs);
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  const F32 factor = splat(inverse), rounder = splat(kRounder);
  int32_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    const U32 whole = bits_as<U32>(load(x + i) * factor + rounder) + 128;
    const U8 bytes = __builtin_convertvector(whole, U8);
    std::memcpy(out + i, &bytes, sizeof bytes);
  }
  for (; i < inputs; ++i) out[i] = to_byte(x[i] * inverse);
  for (; i < padded; ++i) out[i] = 128;
  return most / 127.0f;
}

}  // namespace

int64_t operand_stride(WeightKind kind, int32_t inputs) {
  switch (kind) {
    case WeightKind::kFloat32:
      return aligned(4 * static_cast<int64_t>(inputs));
    case WeightKind::kInt8:
      return aligned(inputs);
    case WeightKind::kInt4:
      return aligned((static_cast<int64_t>(inputs) + kGroup - 1) / kGroup * kGroupRowBytes);
    case WeightKind::kBfloat16:
      break;
  }
  return aligned(2 * static_cast<int64_t>(inputs));
}

void put_row(WeightKind kind, const float* x, int32_t inputs, const Operand& operand, int64_t row) {
  uint8_t* out = static_cast<uint8_t*>(operand.data) + row * operand.stride;
  const int64_t padded = operand_stride(kind, inputs);
  switch (kind) {
    case WeightKind::kFloat32:
      put_floats(x, inputs, reinterpret_cast<float*>(out), padded / 4);
      break;
    case WeightKind::kInt8:
      operand.scales[row] = put_bytes(x, inputs, out, padded);
      break;
    case WeightKind::kInt4:
      put_groups(x, inputs, out);
      break;
    case WeightKind::kBfloat16:
      put_brain_floats(x, inputs, reinterpret_cast<Bf16*>(out), padded / 2);
      break;
  }
}

}  // namespace catenary
