// Tiles of float32, bfloat16 and int8 weights. Their loops have one shape: a step takes four bytes of each
// row (one float, two brain floats or four bytes), spread over a vector, and two vectors of weights.
#pragma once

#include "tile.h"

namespace catenary {

struct Float32Dot {
  using Sum = F32;
  using Weights = F32;
  static constexpr int kInputs = 1;
  // As many accumulators as there are registers for, or what addresses of rows there are registers for.
  static constexpr int kRows = kManyRegisters ? 10 : 6;
  static F32 spread(const uint8_t* x) { return splat(load_as<float>(x)); }
  static F32 add(F32 sum, F32 x, F32 weights) { return fma(x, weights, sum); }
};

struct Bfloat16Dot {
  using Sum = F32;
  using Weights = U32;
  static constexpr int kInputs = 2;
  // With 16 registers: as each pair of brain floats may have to be taken apart in a register of its own.
  static constexpr int kRows = kManyRegisters ? 10 : 4;
  static U32 spread(const uint8_t* x) { return splat_pair(reinterpret_cast<const Bf16*>(x)); }
  static F32 add(F32 sum, U32 x, U32 weights) { return dot_pairs(sum, x, weights); }
};

struct Int8Dot {
  using Sum = I32;
  using Weights = I32;
  static constexpr int kInputs = 4;
  static constexpr int kRows = kManyRegisters ? 10 : 4;
  static I32 spread(const uint8_t* x) { return splat_quad(x); }
  static I32 add(I32 sum, I32 x, I32 weights) { return dot_quads(sum, x, weights); }
};

template <typename Dot>
struct StepTiles {
  static constexpr int kRows = Dot::kRows;
  // With more rows there is so much to compute that memory comes anyway.
  static constexpr int kOnceRows = 4;
  static constexpr int kInputs = Dot::kInputs;
  static constexpr int64_t kRowBytes = 4;
  static constexpr int64_t kPanelBytes = 2 * kBytes;

  template <int Rows, bool Once>
  static void add(const Stretch& stretch, const uint8_t* x, int64_t stride, uint8_t* tile) {
    typename Dot::Sum sums[Rows][2];
    load_tile(tile, stretch.begins, sums);
    // Asking costs as much as a product does, so it is no part of the loop where nothing is asked for.
    if (stretch.ahead != nullptr) {
      add_steps<Rows, Once, true>(stretch, x, stride, sums);
    } else {
      add_steps<Rows, Once, false>(stretch, x, stride, sums);
    }
    store_tile(sums, tile);
  }

 private:
  template <int Rows, bool Once, bool kAsks>
  static void add_steps(
      const Stretch& stretch, const uint8_t* x, int64_t stride, typename Dot::Sum (&sums)[Rows][2]) {
    using Weights = typename Dot::Weights;
    const uint8_t* panel = stretch.panel;
    const uint8_t* ahead = stretch.ahead;
    for (int64_t step = 0; step < stretch.steps; ++step) {
      if constexpr (kAsks) {
        prefetch<kPanelBytes, Once>(ahead);
        ahead += stretch.ahead_bytes;
      }
      const Weights left = load_as<Weights>(panel), right = load_as<Weights>(panel + kBytes);
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
        const auto spread = Dot::spread(x + row * stride + kRowBytes * step);
        sums[row][0] = Dot::add(sums[row][0], spread, left);
        sums[row][1] = Dot::add(sums[row][1], spread, right);
      }
      panel += kPanelBytes;
    }
  }
};

}  // namespace catenary
