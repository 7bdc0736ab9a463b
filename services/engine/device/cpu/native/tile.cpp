#include "tile.h"

#include <array>
#include <utility>

#include "tile_int4.h"
#include "tile_steps.h"

namespace catenary {

namespace {

template <typename Tiles, bool Once, int... Index>
constexpr std::array<TileFunction, sizeof...(Index)> by_rows(std::integer_sequence<int, Index...>) {
  return {&Tiles::template add<Index + 1, Once>...};
}

template <typename Tiles>
TileFunctions describe() {
  static constexpr auto functions = by_rows<Tiles, false>(std::make_integer_sequence<int, Tiles::kRows>{});
  static constexpr auto once = by_rows<Tiles, true>(std::make_integer_sequence<int, Tiles::kOnceRows>{});
  return {functions.data(), Tiles::kRows,     once.data(),       Tiles::kOnceRows,
          Tiles::kInputs,   Tiles::kRowBytes, Tiles::kPanelBytes};
}

}  // namespace

TileFunctions tile_functions(WeightKind kind) {
  switch (kind) {
    case WeightKind::kFloat32:
      return describe<StepTiles<Float32Dot>>();
    case WeightKind::kInt8:
      return describe<StepTiles<Int8Dot>>();
    case WeightKind::kInt4:
      return describe<Int4Tiles>();
    case WeightKind::kBfloat16:
      break;
  }
  return describe<StepTiles<Bfloat16Dot>>();
}

}  // namespace catenary
