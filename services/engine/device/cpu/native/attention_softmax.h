// The softmax of attention, over one chunk of positions at a time, and the joining of chunks.
#pragma once

#include <algorithm>
#include <limits>

#include "activation.h"
#include "simd.h"

namespace catenary {

constexpr float kLog2E = 1.44269504f;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// 2^x of x <= 0, and 0 below -126.5. What is no number stays none. A polynomial of kDegree (Taylor's, on
// [-0.5, 0.5]) over what rounding leaves: off by 4e-5 of the result with 4, as little as float32 holds with
// 6.
template <int kDegree>
inline F32 power_of_two(F32 x) {
  constexpr float kTerms[] = {1.0f,           0.693147181f,   0.240226507f,  0.0555041087f,
                              0.00961812911f, 0.00133335581f, 0.000154035304f};
  // Added to x, this leaves the whole number nearest to it, and 127, in the lowest bits: the exponent of a
  // float.
  const F32 shift = splat(12582912.0f + 127.0f);
  const F32 least = splat(-127.0f);
  const F32 y = x < least ? least : x;
  const F32 shifted = y + shift;
  const F32 rest = y - (shifted - shift);
  F32 p = splat(kTerms[kDegree]);
#pragma GCC unroll 8
  for (int term = kDegree - 1; term >= 0; --term) p = fma(p, rest, splat(kTerms[term]));
  return p * bits_as<F32>(bits_as<U32>(shifted) << 23);
}

inline float power_of_two(float x) { return power_of_two<6>(splat(x))[0]; }

// Weighted sums of values: `sums` [dims], the largest score, and the total of the weights 2^(factor * (score
// - largest)). A total of 0: nothing was seen.
struct Softmax {
  float* sums;
  float* most;
  float* total;

  Softmax at(int64_t row, int64_t stride) const { return {sums + row * stride, most + row, total + row}; }
};

// What a score is multiplied with, for a power of two; softcapping comes before it: cap * tanh(score *
// into_cap).
struct Scores {
  float factor;
  float cap;
  float into_cap;

  static Scores of(float scale, float softcap) {
    if (softcap == 0.0f) return {scale * kLog2E, 0.0f, 0.0f};
    return {kLog2E, softcap, scale / softcap};
  }
};

// Makes weights of the scores of positions [first, end), in their place, as floats or brain floats from `row`
// on; those beside them in the vectors from `from` to `to` become 0.
template <typename Packed>
void soften(const Scores& scores, float* row, int first, int end, int from, int to, float* most,
            float* total) {
  if (scores.cap != 0.0f) {
    for (int i = from; i < to; i += kLanes) {
      store(row + i, scores.cap * tanh(scores.into_cap * load(row + i)));
    }
  }
  std::fill(row + from, row + first, kHidden);
  std::fill(row + end, row + to, kHidden);
  F32 largest_of = splat(kHidden);
  for (int i = from; i < to; i += kLanes) largest_of = max(largest_of, load(row + i));
  *most = largest(largest_of);
  const F32 factor = splat(scores.factor), bias = splat(-*most * scores.factor);
  constexpr int kDegree = std::is_same_v<Packed, Bf16> ? 4 : 6;
  F32 totals{};
  for (int i = from; i < to; i += kLanes) {
    const F32 weight = power_of_two<kDegree>(fma(load(row + i), factor, bias));
    totals += weight;
    store(reinterpret_cast<Packed*>(row) + i, weight);
  }
  *total = sum(totals);
}

// Nobody is seen: all weights are 0.
template <typename Packed>
void hide(float* row, int from, int to, float* most, float* total) {
  std::fill(reinterpret_cast<Packed*>(row) + from, reinterpret_cast<Packed*>(row) + to, Packed{});
  *most = kHidden;
  *total = 0.0f;
}

// Adds a chunk's sums to those before it.
inline void join(const Softmax& all, const Softmax& chunk, int columns, float factor) {
  if (*chunk.total == 0.0f) return;
  if (*all.total == 0.0f) {
    *all.most = *chunk.most;
    *all.total = *chunk.total;
    std::copy_n(chunk.sums, columns, all.sums);
    return;
  }
  const float most = std::max(*all.most, *chunk.most);
  const float before = *all.most == most ? 1.0f : power_of_two((*all.most - most) * factor);
  const float now = *chunk.most == most ? 1.0f : power_of_two((*chunk.most - most) * factor);
  *all.most = most;
  *all.total = *all.total * before + *chunk.total * now;
  for (int i = 0; i < columns; i += kLanes) {
    store(all.sums + i, fma(load(all.sums + i), splat(before), load(chunk.sums + i) * now));
  }
}

}  // namespace catenary
