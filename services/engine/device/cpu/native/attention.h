// How the attention of a forward is divided, and what its pieces keep in memory.
//
// Everything is computed in chunks of kChunk positions that begin at multiples of it: their sums are joined
// in turn, whoever computed them. So it makes no difference which thread computes which of them, and long
// contexts of few sequences are divided like short ones of many.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention_products.h"
#include "attention_softmax.h"
#include "kernels.h"

namespace catenary {

constexpr int kChunk = 128;
// Rows (a token's heads of one kv head) that share one packing of keys and values: blocks of kBlockRows,
// which go through a chunk one after the other, so that their scores stay in the nearest cache.
constexpr int kTileRows = 192;

static_assert(kChunk % kWidth == 0 && kTileRows % kBlockRows == 0);

// Some tokens of a span.
struct AttentionTile {
  int64_t first;
  int32_t tokens;
  // Of the first token.
  int32_t position;
  const int32_t* blocks;
  int32_t chunks;
  // Where the sums of its chunks begin in `partials`, in rows of sums; -1 if whoever attends to a head does
  // so for all chunks.
  int64_t partials;
};

// Some kv heads of a tile, and some of its chunks.
struct AttentionPiece {
  int32_t tile;
  int32_t head;
  int32_t heads;
  int32_t chunk;
  int32_t chunks;
  // Pieces that attend to the same heads for other chunks, and the counter of those that are done; 1 if there
  // are none.
  int32_t parts;
  int32_t counter;
  int64_t work;
};

struct AttentionPlan {
  int32_t threads;
  int32_t heads;
  int32_t kv_heads;
  int32_t group;
  int32_t dims;
  // `dims` in whole vectors: a row of sums.
  int32_t columns;
  CacheKind kind;
  std::vector<AttentionTile> tiles;
  std::vector<AttentionPiece> pieces;
  // Most rows of a piece, its kv heads together, and most whose scores are kept at once.
  int64_t rows;
  int64_t rows_at_once;
  // Of tiles whose chunks are divided: sums [chunks, kv_heads, rows of the tile, columns], and likewise.
  // Blocks of rows are sums [dims, kBlockRows] in the room of as many rows.
  std::unique_ptr<float[]> sums;
  std::unique_ptr<float[]> most;
  std::unique_ptr<float[]> total;
  std::unique_ptr<std::atomic<int32_t>[]> done;

  // Whether a tile has few rows: its kv heads are taken together and nothing is packed.
  bool few(const AttentionTile& tile) const { return tile.tokens == 1 && group <= kRegisterRows; }

  // Rows of a tile's kv head that there is room for: blocks are whole.
  int64_t room(const AttentionTile& tile) const {
    const int64_t rows = static_cast<int64_t>(tile.tokens) * group;
    return few(tile) ? rows : (rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  }

  Softmax partials(const AttentionTile& tile, int chunk, int head) const {
    const int64_t row = tile.partials + (static_cast<int64_t>(chunk) * kv_heads + head) * room(tile);
    return Softmax{sums.get(), most.get(), total.get()}.at(row, columns);
  }
};

// Where a piece keeps what in its thread's scratch: offsets in bytes, multiples of 64.
struct AttentionScratch {
  int64_t offsets, keys, values, scores, queries;
  int64_t sums, most, total;
  int64_t chunk_sums, chunk_most, chunk_total, spare;
  int64_t bytes;
  // Units of four bytes in a packed row of keys, and in a panel of values.
  int32_t units;
  int64_t value_stride;

  explicit AttentionScratch(const AttentionPlan& plan);
};

}  // namespace catenary
