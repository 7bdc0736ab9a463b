// Rows without outliers, for products of 8 bits.
//
// A row has one scale, and what a language model computes has a few channels far larger than the others: with
// a scale that holds them little is left of the rest. So rows are multiplied by a Hadamard matrix H, which
// spreads every channel over many, and weights, when they are packed, by H / size: H is its own inverse times
// its size, and the product stays what it was. (Ashkboos et al., QuaRot, 2024, and others before.)
#pragma once

#include <cstdint>

namespace catenary {

constexpr int32_t kMostMixed = 64;

// How many channels are mixed with one another: the largest power of two up to kMostMixed that divides the
// inputs.
inline int32_t mixed_channels(int32_t inputs) {
  const int32_t power = inputs & -inputs;
  return power < kMostMixed ? power : kMostMixed;
}

// Multiplies a row, seen as [mixed, inputs / mixed], by the Hadamard matrix of that many rows, in place and
// without dividing.
inline void mix(float* row, int32_t inputs) {
  const int32_t mixed = mixed_channels(inputs);
  for (int32_t span = inputs / mixed; span < inputs / mixed * mixed; span *= 2) {
    for (float* first = row; first < row + inputs; first += 2 * span) {
      float* second = first + span;
      for (int32_t i = 0; i < span; ++i) {
        const float sum = first[i] + second[i], difference = first[i] - second[i];
        first[i] = sum;
        second[i] = difference;
      }
    }
  }
}

}  // namespace catenary
