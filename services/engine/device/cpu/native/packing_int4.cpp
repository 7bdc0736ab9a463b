// Packs a weight in 4 bits: groups of kGroup inputs, each with a scale and an offset for each output. A
// weight is whole * scale + offset, whole numbers being -8 to 7.
//
// Of a group, a panel has first the scales and offsets, brain floats [kPanel] each, then words [kGroup /
// 8][2][kLanes]: a word has eight whole weights of one output. Its lower half has the even inputs, its upper
// half the odd ones, four each from the lowest bits on, 8 added to each. So one shift and one look-up for
// each 16 bits make pairs of brain floats as dot_pairs takes them.
#include "packing.h"

namespace catenary {

namespace {

// Candidates of a group's grid. `step`: a part of the range; `middle`: the whole number of the middle of the
// range.
struct Grid {
  float step;
  float middle;
};

// The range in 15, 14 or 13 steps, which finds again what was on such a grid, or finer ones that cut the
// extremes off.
constexpr Grid kGrids[] = {{0.066666667f, -0.5f}, {0.071428571f, -1.0f}, {0.076923077f, -1.5f},
                           {0.062f, -0.5f},       {0.0573f, -0.5f},      {0.0533f, -0.5f}};

// Adding it rounds to the nearest whole number, ties to even.
constexpr float kRounder = 12582912.0f;

// A group of kLanes outputs as it was. Outputs lie in lanes: sums over inputs have one order at all levels.
using Weights = F32[kGroup];

struct Quantized {
  Weights wholes;
  F32 scale;
  F32 offset;
  F32 error;
};

F32 inverse_of(F32 value) { return value == 0.0f ? F32{} : 1.0f / value; }

F32 to_whole(F32 value) { return min(max((value + kRounder) - kRounder, splat(-8.0f)), splat(7.0f)); }

// Rounds to a brain float.
F32 brain(F32 value) { return widen(narrow(value)); }

// Scale and offset by least squares for given whole weights, and the squared error that they leave.
void fit(const Weights& weights, Quantized& group) {
  F32 sum = F32{}, whole_sum = F32{}, product_sum = F32{}, square_sum = F32{};
  for (int i = 0; i < kGroup; ++i) {
    const F32 whole = group.wholes[i];
    sum += weights[i];
    whole_sum += whole;
    product_sum += weights[i] * whole;
    square_sum += whole * whole;
  }
  constexpr float count = kGroup;
  const F32 spread = count * square_sum - whole_sum * whole_sum;
  const F32 slope = (count * product_sum - whole_sum * sum) / spread;
  group.scale = brain(spread == 0.0f ? F32{} : slope);
  group.offset = brain((sum - group.scale * whole_sum) * (1.0f / count));
  group.error = F32{};
  for (int i = 0; i < kGroup; ++i) {
    const F32 off = weights[i] - (group.scale * group.wholes[i] + group.offset);
    group.error += off * off;
  }
}

void keep_better(const Quantized& candidate, Quantized& best) {
  const I32 better = candidate.error < best.error;
  best.error = better ? candidate.error : best.error;
  best.scale = better ? candidate.scale : best.scale;
  best.offset = better ? candidate.offset : best.offset;
  for (int i = 0; i < kGroup; ++i) best.wholes[i] = better ? candidate.wholes[i] : best.wholes[i];
}

// Of all candidates, and of what comes of fitting each once more, that with the least squared error.
Quantized quantize(const Weights& weights) {
  F32 least = weights[0], most = weights[0], strange = F32{};
  for (const F32& weight : weights) {
    least = min(weight, least);
    most = max(weight, most);
    strange += weight * 0.0f;
  }
  Quantized best = {}, candidate;
  best.error = splat(__builtin_inff());
  const F32 middle = (least + most) * 0.5f;
  for (const Grid& grid : kGrids) {
    const F32 inverse = inverse_of((most - least) * grid.step);
    for (int i = 0; i < kGroup; ++i) {
      candidate.wholes[i] = to_whole((weights[i] - middle) * inverse + grid.middle);
    }
    fit(weights, candidate);
    keep_better(candidate, best);
    const F32 fitted = inverse_of(candidate.scale);
    for (int i = 0; i < kGroup; ++i) candidate.wholes[i] = to_whole((weights[i] - candidate.offset) * fitted);
    fit(weights, candidate);
    keep_better(candidate, best);
  }
  // What is no number, or not finite, makes the group's products none.
  best.scale += strange;
  return best;
}

// The group's place in the panel: scales and offsets of these outputs, and the words of their vector.
void store_group(const Quantized& group, uint8_t* panel, int vector) {
  store(reinterpret_cast<Bf16*>(panel) + vector * kLanes, group.scale);
  store(reinterpret_cast<Bf16*>(panel + kGroupScaleBytes) + vector * kLanes, group.offset);
  uint8_t* words = panel + 2 * kGroupScaleBytes + vector * kBytes;
  for (int quarter = 0; quarter < kGroup / 8; ++quarter) {
    U32 word = U32{};
    for (int i = 0; i < 8; ++i) {
      const U32 bits = bits_as<U32>(group.wholes[8 * quarter + i] + (kRounder + 8.0f)) & 0xf;
      word |= bits << (4 * (i / 2) + 16 * (i % 2));
    }
    std::memcpy(words + 2 * quarter * kBytes, &word, sizeof word);
  }
}

}  // namespace

void pack_int4_panel(const float* rows, int32_t count, int32_t inputs, uint8_t* panel) {
  for (int32_t first = 0; first < inputs; first += kGroup, panel += kGroupBytes)
    for (int vector = 0; vector < 2; ++vector) {
      Weights weights = {};
      for (int32_t lane = 0; lane < kLanes && vector * kLanes + lane < count; ++lane) {
        const float* row = rows + (vector * kLanes + lane) * static_cast<int64_t>(inputs);
        for (int32_t i = 0; i < kGroup && first + i < inputs; ++i) weights[i][lane] = row[first + i];
      }
      store_group(quantize(weights), panel, vector);
    }
}

}  // namespace catenary
