// The softmax of attention for many rows: a block's rows are lanes, its positions follow one another.
//
// Each lane goes through the same operations in the same order as a row by itself (attention_softmax.h).
#pragma once

#include "attention_packing.h"
#include "attention_softmax.h"

namespace catenary {

// What a vector of rows sees of a chunk: each lane positions [first, end), and all of them [all_first,
// all_end).
struct Sight {
  I32 first;
  I32 end;
  int all_first;
  int all_end;

  I32 sees(int position) const { return (first <= position) & (end > position); }
};

// Makes weights of the scores of one vector of rows at positions [from, to), whole vectors of positions, in
// their place: scores [positions][kBlockRows] become units [positions in units][kBlockRows]. Positions that a
// lane does not see get the weight 0.
template <typename Packed>
void soften_lanes(const Scores& scores_of, const Sight& sight, int from, int to, float* scores, float* most,
                  float* total) {
  F32 largest_of = splat(kHidden);
  I32 any{};
  const auto look = [&](int begin, int end, auto hides) {
    for (int position = begin; position < end; ++position) {
      float* at = scores + static_cast<int64_t>(position) * kBlockRows;
      F32 score = load(at);
      if (scores_of.cap != 0.0f) score = scores_of.cap * tanh(scores_of.into_cap * score);
      if constexpr (hides) {
        const I32 seen = sight.sees(position);
        score = seen ? score : splat(kHidden);
        any |= seen;
      }
      if (hides || scores_of.cap != 0.0f) store(at, score);
      largest_of = max(largest_of, score);
    }
  };
  const int plain = std::clamp(sight.all_first, from, to), hidden = std::clamp(sight.all_end, plain, to);
  look(from, plain, std::true_type());
  look(plain, hidden, std::false_type());
  look(hidden, to, std::true_type());
  if (hidden > plain) any = I32{} - 1;
  store(most, largest_of);
  const F32 factor = splat(scores_of.factor), bias = any ? -largest_of * factor : F32{};
  constexpr int kInputs = Units<Packed>::kInputs;
  constexpr int kDegree = kInputs == 2 ? 4 : 6;
  // As many sums as a row by itself has lanes, and joined as they are.
  F32 totals[kLanes] = {};
  for (int begin = from; begin < to; begin += kLanes) {
    const float* at = scores + static_cast<int64_t>(begin) * kBlockRows;
    float* to_units = scores + static_cast<int64_t>(begin) / kInputs * kBlockRows;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += kInputs) {
      F32 weights[kInputs];
#pragma GCC unroll 2
      for (int k = 0; k < kInputs; ++k) {
        weights[k] = power_of_two<kDegree>(fma(load(at + (i + k) * kBlockRows), factor, bias));
        totals[i + k] += weights[k];
      }
      U32 unit;
      if constexpr (kInputs == 2) {
        unit = to_pairs(weights[0], weights[1]);
      } else {
        unit = bits_as<U32>(weights[0]);
      }
      std::memcpy(to_units + i / kInputs * kBlockRows, &unit, sizeof unit);
    }
  }
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) totals[i] += totals[i + half];
  }
  store(total, totals[0]);
}

// Adds a chunk's sums [dims][kBlockRows] to those before it. A lane that saw nothing stays as it was.
inline void join_lanes(const Softmax& all, const Softmax& chunk, int dims, float factor) {
  F32 before[kRowVectors], now[kRowVectors];
  for (int i = 0; i < kRowVectors; ++i) {
    const int lane = i * kLanes;
    const F32 old = load(all.most + lane), fresh = load(chunk.most + lane), most = old < fresh ? fresh : old;
    before[i] = old == most ? splat(1.0f) : power_of_two<6>((old - most) * factor);
    now[i] = fresh == most ? splat(1.0f) : power_of_two<6>((fresh - most) * factor);
    store(all.most + lane, most);
    store(all.total + lane, load(all.total + lane) * before[i] + load(chunk.total + lane) * now[i]);
  }
  for (int dim = 0; dim < dims; ++dim) {
    for (int i = 0; i < kRowVectors; ++i) {
      float* to = all.sums + dim * kBlockRows + i * kLanes;
      store(to, fma(load(to), before[i], load(chunk.sums + dim * kBlockRows + i * kLanes) * now[i]));
    }
  }
}

// Rows [kBlockRows][units] as lanes [units][kBlockRows].
template <typename Packed>
void pack_lanes(const Packed* rows, int units, uint32_t* lanes) {
  for (int i = 0; i < kRowVectors; ++i) {
    const Packed* from[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      from[lane] = rows + static_cast<int64_t>(i * kLanes + lane) * units * Units<Packed>::kInputs;
    }
    for (int unit = 0; unit < units; unit += kLanes) {
      U32 turned[kLanes];
      packing::load_transposed(from, unit, units, turned);
      for (int k = 0; k < std::min(kLanes, units - unit); ++k) {
        std::memcpy(lanes + (unit + k) * kBlockRows + i * kLanes, &turned[k], kBytes);
      }
    }
  }
}

// Sums [dims][kBlockRows] over their totals, each row to where `place` says; null: nowhere.
template <typename Place>
void write_lanes(const Softmax& sums, int dims, Place&& place) {
  for (int i = 0; i < kRowVectors; ++i) {
    const F32 factor = 1.0f / load(sums.total + i * kLanes);
    for (int dim = 0; dim < dims; dim += kLanes) {
      const int count = std::min(kLanes, dims - dim);
      U32 lanes[kLanes] = {};
      for (int k = 0; k < count; ++k) {
        lanes[k] = bits_as<U32>(load(sums.sums + (dim + k) * kBlockRows + i * kLanes) * factor);
      }
      packing::transpose(lanes);
      for (int lane = 0; lane < kLanes; ++lane) {
        float* to = place(i * kLanes + lane);
        if (to == nullptr) continue;
        if (count == kLanes) {
          std::memcpy(to + dim, &lanes[lane], kBytes);
        } else {
          std::memcpy(to + dim, &lanes[lane], static_cast<size_t>(count) * sizeof(float));
        }
      }
    }
  }
}

}  // namespace catenary
