// Packs a weight in 4 bits: groups of kGroup inputs, each with a scale for each output.
//
// Of a group, a panel has first the scales, brain floats [kPanel], then words [kGroup / 8][2][kLanes]: a word has eight
// weights of one output. Its lower half has the even inputs, its upper half the odd ones, four each from the lowest
// bits on; a weight is its four bits less 8. So one shift and one look-up for each 16 bits make pairs of brain floats
// as dot_pairs takes them.
#include "packing.h"

namespace catenary {

namespace {

// Candidates of a group's scale: the weight of largest magnitude becomes -8 or so, on either side of the 8 that would
// be natural: a little clipping costs less than coarse steps.
constexpr float kLeastReach = 7.0f;
constexpr float kReachStep = 0.25f;
constexpr int kCandidates = 9;

// Adding it rounds to the nearest whole number, ties to even.
constexpr float kRounder = 12582912.0f;

// One group of kLanes outputs, and what it becomes. Outputs lie in lanes: sums over inputs have one order at all levels.
struct Group {
  F32 weights[kGroup];
  F32 wholes[kGroup];
  F32 scale;
};

F32 whole_weight(F32 weight, F32 inverse) {
  const F32 whole = (weight * inverse + kRounder) - kRounder;
  return min(max(whole, splat(-8.0f)), splat(7.0f));
}

// Rounds to a brain float.
F32 brain(F32 value) { return widen(narrow(value)); }

// The best scale for given whole weights is a least-squares fit; of the candidates that one stays which leaves the
// least squared error.
void quantize(Group& group) {
  F32 extreme = F32{}, strange = F32{};
  for (const F32& weight : group.weights) {
    extreme = max(weight, -weight) > max(extreme, -extreme) ? weight : extreme;
    strange += weight * 0.0f;
  }
  F32 least = splat(0);
  for (int candidate = 0; candidate < kCandidates; ++candidate) {
    const F32 reach = splat(-(kLeastReach + kReachStep * static_cast<float>(candidate)));
    const F32 inverse = extreme == 0.0f ? F32{} : reach / extreme;
    F32 wholes[kGroup], products = F32{}, squares = F32{}, error = F32{};
    for (int i = 0; i < kGroup; ++i) {
      wholes[i] = whole_weight(group.weights[i], inverse);
      products += group.weights[i] * wholes[i];
      squares += wholes[i] * wholes[i];
    }
    const F32 scale = brain(squares == 0.0f ? F32{} : products / squares);
    for (int i = 0; i < kGroup; ++i) {
      const F32 off = group.weights[i] - scale * wholes[i];
      error += off * off;
    }
    const I32 better = candidate == 0 ? I32{} == 0 : error < least;
    least = better ? error : least;
    group.scale = better ? scale : group.scale;
    for (int i = 0; i < kGroup; ++i) group.wholes[i] = better ? wholes[i] : group.wholes[i];
  }
  group.scale = brain(group.scale + strange);
}

// The group's place in the panel: the scales of these outputs, and the words of their vector.
void store_group(const Group& group, Bf16* scales, uint8_t* words, int vector) {
  store(scales + vector * kLanes, group.scale);
  for (int quarter = 0; quarter < kGroup / 8; ++quarter) {
    U32 word = U32{};
    for (int i = 0; i < 8; ++i) {
      const U32 bits = bits_as<U32>(group.wholes[8 * quarter + i] + (kRounder + 8.0f)) & 0xf;
      word |= bits << (4 * (i / 2) + 16 * (i % 2));
    }
    std::memcpy(words + (2 * quarter + vector) * kBytes, &word, sizeof word);
  }
}

}  // namespace

void pack_int4_panel(const float* rows, int32_t count, int32_t inputs, uint8_t* panel) {
  for (int32_t first = 0; first < inputs; first += kGroup, panel += kGroupBytes)
    for (int vector = 0; vector < 2; ++vector) {
      Group group = {};
      for (int32_t lane = 0; lane < kLanes && vector * kLanes + lane < count; ++lane) {
        const float* row = rows + (vector * kLanes + lane) * static_cast<int64_t>(inputs);
        for (int32_t i = 0; i < kGroup && first + i < inputs; ++i) group.weights[i][lane] = row[first + i];
      }
      quantize(group);
      store_group(group, reinterpret_cast<Bf16*>(panel), panel + 2 * kPanel, vector);
    }
}

}  // namespace catenary
