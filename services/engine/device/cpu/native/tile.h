// The innermost loops of products: some rows times one panel.
//
// Every sum has one accumulator, to which products are added in the order of the inputs, however many rows
// are computed beside it: so a row's bits are the same whatever its neighbours are.
#pragma once

#include "kernels.h"

namespace catenary {

constexpr bool kManyRegisters = kLanes == 16;

// Bytes of a row's sums with one panel: two vectors of floats, of int8 weights whole numbers.
constexpr int64_t kTileBytes = 2 * kBytes;

// What a call reads beside its rows: some steps of a panel, and memory that is wanted soon, from `ahead` on,
// a little of it with each step; null: none. `begins`: the tile holds no sums yet.
struct Stretch {
  const uint8_t* panel;
  int64_t steps;
  const uint8_t* ahead;
  int64_t ahead_bytes;
  bool begins;
};

// Adds the products of a stretch with rows x, x + stride, ... to a tile, kTileBytes for each row.
using TileFunction = void (*)(const Stretch& stretch, const uint8_t* x, int64_t stride, uint8_t* tile);

// A kind's functions for 1, 2, ... rows, and what a caller has to know to cut its work into calls.
struct TileFunctions {
  const TileFunction* by_rows;
  int rows;
  // The same for so few rows and panels that are used once: what they read and ask for passes the caches by,
  // since what these evict takes bandwidth too.
  const TileFunction* once;
  int once_rows;
  // What one step takes: inputs, bytes of each row, bytes of a panel.
  int inputs;
  int64_t row_bytes;
  int64_t panel_bytes;
};

TileFunctions tile_functions(WeightKind kind);

template <int64_t Bytes, bool Once = false>
inline void prefetch(const uint8_t* at) {
  // Into the second level: it has room for what comes next beside what is being read.
  for (int64_t offset = 0; offset < Bytes; offset += 64) __builtin_prefetch(at + offset, 0, Once ? 0 : 2);
}

template <typename Sum, int Rows>
inline void load_tile(const uint8_t* tile, bool begins, Sum (&sums)[Rows][2]) {
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      sums[row][half] = begins ? Sum{} : load_as<Sum>(tile + row * kTileBytes + half * kBytes);
    }
  }
}

// Vector by vector: as one array they would have to be written to memory twice.
template <typename Sum, int Rows>
inline void store_tile(const Sum (&sums)[Rows][2], uint8_t* tile) {
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      std::memcpy(tile + row * kTileBytes + half * kBytes, &sums[row][half], kBytes);
    }
  }
}

}  // namespace catenary
