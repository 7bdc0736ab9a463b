// Tiles of int4 weights: a step is a group of inputs. Its sum counts by the group's scale, and that of the
// inputs alone by the group's offset.
#pragma once

#include "packing.h"
#include "tile.h"

namespace catenary {

#if defined(__AVX512BF16__)
// Two inputs' whole weights in each lane, as dot products want them.
using Wholes = U32;

// Of the lowest four bits of each 16 bits of `words`; see packing_int4.cpp.
inline Wholes wholes_of(U32 words) {
  // -8 to 7 as brain floats, twice: the fifth bit of an index belongs to the next weight.
  alignas(64) static constexpr uint16_t table[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
  };
  return bits_as<U32>(_mm512_permutexvar_epi16(bits_as<__m512i>(words), _mm512_load_si512(table)));
}

inline F32 dot_wholes(F32 acc, U32 pair, const Wholes& wholes) { return dot_pairs(acc, pair, wholes); }
#else
// Without such products: of even and odd inputs apart, as floats.
struct Wholes {
  F32 even;
  F32 odd;
};

inline F32 whole_of(U32 bits) {
#if defined(__AVX512F__)
  // The other bits of an index are not looked at.
  alignas(64) static constexpr float table[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return bits_as<F32>(_mm512_permutexvar_ps(bits_as<__m512i>(bits), _mm512_load_ps(table)));
#else
  return to_floats(bits_as<I32>(bits & 0xf)) - 8.0f;
#endif
}

inline Wholes wholes_of(U32 words) { return {whole_of(words), whole_of(words >> 16)}; }

inline F32 dot_wholes(F32 acc, U32 pair, const Wholes& wholes) {
  acc = fma(bits_as<F32>(pair << 16), wholes.even, acc);
  return fma(bits_as<F32>(pair & 0xffff0000u), wholes.odd, acc);
}
#endif

struct Int4Tiles {
  // The sums of a group stand beside those of all groups.
  static constexpr int kRows = kManyRegisters ? 6 : 4;
  // Memory is not what it waits for.
  static constexpr int kOnceRows = 0;
  static constexpr int kInputs = kGroup;
  static constexpr int64_t kRowBytes = kGroupRowBytes;
  static constexpr int64_t kPanelBytes = kGroupBytes;

  template <int Rows, bool Once>
  static void add(const Stretch& stretch, const uint8_t* x, int64_t stride, uint8_t* tile) {
    F32 totals[Rows][2];
    load_tile(tile, stretch.begins, totals);
    const uint8_t* panel = stretch.panel;
    const uint8_t* ahead = stretch.ahead;
    for (int64_t step = 0; step < stretch.steps; ++step) {
      if (ahead != nullptr) {
        prefetch<kPanelBytes, Once>(ahead);
        ahead += stretch.ahead_bytes;
      }
      F32 sums[Rows][2] = {};
      add_group<Rows>(panel + 2 * kGroupScaleBytes, x, stride, sums);
      for (int half = 0; half < 2; ++half) {
        const F32 scales = load(reinterpret_cast<const Bf16*>(panel) + half * kLanes);
        const F32 offsets = load(reinterpret_cast<const Bf16*>(panel + kGroupScaleBytes) + half * kLanes);
        for (int row = 0; row < Rows; ++row) {
          const F32 inputs = splat(load_as<float>(x + row * stride + 2 * kGroup));
          totals[row][half] = fma(inputs, offsets, fma(sums[row][half], scales, totals[row][half]));
        }
      }
      x += kRowBytes;
      panel += kPanelBytes;
    }
    store_tile(totals, tile);
  }

 private:
  template <int Rows>
  static void add_group(const uint8_t* words, const uint8_t* x, int64_t stride, F32 (&sums)[Rows][2]) {
    for (int quarter = 0; quarter < kGroup / 8; ++quarter) {
      U32 left = load_as<U32>(words + 2 * quarter * kBytes);
      U32 right = load_as<U32>(words + (2 * quarter + 1) * kBytes);
      for (int pair = 0; pair < 4; ++pair) {
        const Wholes left_wholes = wholes_of(left), right_wholes = wholes_of(right);
        for (int row = 0; row < Rows; ++row) {
          const auto* here = reinterpret_cast<const Bf16*>(x + row * stride);
          const U32 spread = splat_pair(here + 8 * quarter + 2 * pair);
          sums[row][0] = dot_wholes(sums[row][0], spread, left_wholes);
          sums[row][1] = dot_wholes(sums[row][1], spread, right_wholes);
        }
        left >>= 4;
        right >>= 4;
      }
    }
  }
};

}  // namespace catenary
