// Packs weights once, in the order in which products read them.
#include "packing.h"

namespace catenary {

namespace {

int64_t ceiling(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

void pack_float32_panel(const float* rows, int32_t count, int32_t inputs, float* panel) {
  for (int32_t output = 0; output < kPanel; ++output)
    for (int32_t i = 0; i < inputs; ++i)
      panel[static_cast<int64_t>(i) * kPanel + output] =
          output < count ? rows[static_cast<int64_t>(output) * inputs + i] : 0.0f;
}

void pack_bfloat16_panel(const float* rows, int32_t count, int32_t inputs, Bf16* panel) {
  for (int32_t output = 0; output < kPanel; ++output)
    for (int64_t i = 0; i < ceiling(inputs, 2) * 2; ++i) {
      const bool inside = output < count && i < inputs;
      const float value = inside ? rows[static_cast<int64_t>(output) * inputs + i] : 0.0f;
      from_float(value, panel + (i / 2 * kPanel + output) * 2 + i % 2);
    }
}

// The largest magnitude; no number if a weight is none or not finite, and so is its output then.
float magnitude(const float* weights, int32_t inputs) {
  float most = 0, strange = 0;
  for (int32_t i = 0; i < inputs; ++i) {
    const float size = weights[i] < 0 ? -weights[i] : weights[i];
    most = most < size ? size : most;
    strange += weights[i] * 0.0f;
  }
  return most + strange;
}

void pack_int8_panel(
    const float* rows, int32_t count, int32_t inputs, int8_t* panel, float* scales, int32_t* sums) {
  // Adding it rounds to the nearest whole number, ties to even, in the lowest bits.
  constexpr float rounder = 12582912.0f;
  for (int32_t output = 0; output < kPanel; ++output) {
    const float* row = rows + static_cast<int64_t>(output) * inputs;
    const float most = output < count ? magnitude(row, inputs) : 0.0f;
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    int32_t total = 0;
    for (int64_t i = 0; i < ceiling(inputs, 4) * 4; ++i) {
      const float scaled = output < count && i < inputs ? row[i] * inverse : 0.0f;
      const int8_t whole = static_cast<int8_t>(bits_as<uint32_t>(scaled + rounder));
      panel[(i / 4 * kPanel + output) * 4 + i % 4] = whole;
      total += whole;
    }
    scales[output] = most / 127.0f;
    sums[output] = total;
  }
}

}  // namespace

int64_t panel_bytes(WeightKind kind, int32_t inputs) {
  switch (kind) {
    case WeightKind::kFloat32:
      return static_cast<int64_t>(inputs) * kPanel * 4;
    case WeightKind::kBfloat16:
      return ceiling(inputs, 2) * kPanel * 4;
    case WeightKind::kInt8:
      return ceiling(inputs, 4) * kPanel * 4;
    case WeightKind::kInt4:
      break;
  }
  return ceiling(inputs, kGroup) * kGroupBytes;
}

int64_t packed_bytes(WeightKind kind, int32_t outputs, int32_t inputs, int32_t gated) {
  return panels_of(outputs, gated) * panel_bytes(kind, inputs);
}

void pack(
    WeightKind kind, const float* weight, const float* ups, int32_t outputs, int32_t inputs, void* panels,
    float* scales, int32_t* sums) {
  const int32_t gated = ups != nullptr;
  const int32_t each = gated ? outputs / 2 : outputs;
  const int64_t size = panel_bytes(kind, inputs);
  for (int64_t index = 0; index < panels_of(outputs, gated); ++index) {
    const int64_t first = (gated ? index / 2 : index) * kPanel;
    const float* rows = (gated && index % 2 ? ups : weight) + first * inputs;
    const int32_t count = static_cast<int32_t>(each - first < kPanel ? each - first : kPanel);
    uint8_t* panel = static_cast<uint8_t*>(panels) + index * size;
    switch (kind) {
      case WeightKind::kFloat32:
        pack_float32_panel(rows, count, inputs, reinterpret_cast<float*>(panel));
        break;
      case WeightKind::kBfloat16:
        pack_bfloat16_panel(rows, count, inputs, reinterpret_cast<Bf16*>(panel));
        break;
      case WeightKind::kInt8:
        pack_int8_panel(
            rows, count, inputs, reinterpret_cast<int8_t*>(panel), scales + index * kPanel,
            sums + index * kPanel);
        break;
      case WeightKind::kInt4:
        pack_int4_panel(rows, count, inputs, panel);
        break;
    }
  }
}

Linear part_of(const Linear& linear, int32_t begin, int32_t end) {
  Linear part = linear;
  part.outputs = end - begin;
  const int64_t before = begin / kPanel * panel_bytes(linear.kind, linear.inputs);
  part.panels = static_cast<const uint8_t*>(linear.panels) + before;
  if (linear.scales != nullptr) part.scales += begin;
  if (linear.sums != nullptr) part.sums += begin;
  if (linear.bias != nullptr) part.bias += begin;
  return part;
}

void unpack_row(const Linear& linear, int64_t output, float factor, float* row) {
  const int64_t lane = output % kPanel;
  const uint8_t* panel =
      static_cast<const uint8_t*>(linear.panels) + output / kPanel * panel_bytes(linear.kind, linear.inputs);
  if (linear.kind == WeightKind::kFloat32) {
    for (int64_t i = 0; i < linear.inputs; ++i)
      row[i] = load_as<float>(reinterpret_cast<const float*>(panel) + i * kPanel + lane) * factor;
    return;
  }
  for (int64_t i = 0; i < linear.inputs; ++i) {
    const Bf16* number = reinterpret_cast<const Bf16*>(panel) + (i / 2 * kPanel + lane) * 2 + i % 2;
    row[i] = to_float(load_as<Bf16>(number)) * factor;
  }
}

void pack_bias(const float* bias, const float* ups, int32_t outputs, float* packed) {
  const int32_t gated = ups != nullptr;
  const int32_t each = gated ? outputs / 2 : outputs;
  for (int64_t index = 0; index < panels_of(outputs, gated); ++index) {
    const int64_t first = (gated ? index / 2 : index) * kPanel;
    const float* from = gated && index % 2 ? ups : bias;
    for (int64_t output = 0; output < kPanel; ++output)
      packed[index * kPanel + output] = first + output < each ? from[first + output] : 0.0f;
  }
}

}  // namespace catenary
