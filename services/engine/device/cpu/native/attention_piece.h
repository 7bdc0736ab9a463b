// What a piece of attention is made of: which rows and chunks, where keys and values lie, and where sums go.
#pragma once

#include "attention.h"
#include "attention_lanes.h"

namespace catenary {

// A chunk of which a piece sees something, and where its positions lie in the cache: elements from its begin.
struct Positions {
  const AttentionPiece* piece;
  int chunk;
  Range range;
  int64_t* offsets;
};

class PieceBase {
 public:
  PieceBase(const AttentionPlan& plan, const AttentionPiece& piece, const AttentionShape& shape,
        const Cache& cache, char* scratch)
      : plan_(plan), piece_(piece), shape_(shape), cache_(cache), tile_(plan.tiles[piece.tile]),
        scores_of_(Scores::of(shape.scale, shape.softcap)), rows_(tile_.tokens * plan.group),
        room_(plan.room(tile_)), at_(plan),
        offsets_(reinterpret_cast<int64_t*>(scratch + at_.offsets)),
        keys_(reinterpret_cast<uint32_t*>(scratch + at_.keys)),
        values_(reinterpret_cast<uint32_t*>(scratch + at_.values)),
        queries_(reinterpret_cast<uint32_t*>(scratch + at_.queries)),
        scores_(reinterpret_cast<float*>(scratch + at_.scores)),
        all_{reinterpret_cast<float*>(scratch + at_.sums), reinterpret_cast<float*>(scratch + at_.most),
             reinterpret_cast<float*>(scratch + at_.total)},
        chunk_{reinterpret_cast<float*>(scratch + at_.chunk_sums),
               reinterpret_cast<float*>(scratch + at_.chunk_most),
               reinterpret_cast<float*>(scratch + at_.chunk_total)},
        spare_(reinterpret_cast<float*>(scratch + at_.spare)) {}

 protected:
  bool few() const { return plan_.few(tile_); }
  bool divided() const { return piece_.parts > 1; }

  // What tokens [first, last] of a tile see of a chunk, together.
  Range seen(const AttentionTile& tile, int first, int last, int chunk) const {
    const int64_t begin = static_cast<int64_t>(chunk) * kChunk;
    const int64_t end = tile.position + last + 1 - begin;
    const int64_t back = shape_.window > 0 ? tile.position + first + 1 - shape_.window - begin : 0;
    return {static_cast<int>(std::clamp<int64_t>(back, 0, kChunk)),
            static_cast<int>(std::clamp<int64_t>(end, 0, kChunk))};
  }

  Range seen(int first, int last, int chunk) const { return seen(tile_, first, last, chunk); }

  // The first chunk of a piece, from `chunk` on, of which something is seen; no piece if there is none.
  Positions positions(const AttentionPiece& piece, int chunk, int64_t* offsets) const {
    const AttentionTile& tile = plan_.tiles[piece.tile];
    for (chunk = std::max(chunk, piece.chunk); chunk < piece.chunk + piece.chunks; ++chunk) {
      const Range range = seen(tile, 0, tile.tokens - 1, chunk);
      if (range.empty()) continue;
      find_offsets(tile, chunk, range, offsets);
      return {&piece, chunk, range, offsets};
    }
    return {};
  }

  // What this thread will read after a chunk: the next one, or of the piece that it is likely to take next.
  Positions positions_after(const Positions& now, int64_t* offsets) const {
    const Positions next = positions(piece_, now.chunk + 1, offsets);
    const int64_t likely = &piece_ - plan_.pieces.data() + plan_.threads;
    if (next.piece || likely >= static_cast<int64_t>(plan_.pieces.size())) return next;
    return positions(plan_.pieces[likely], 0, offsets);
  }

  void find_offsets(const AttentionTile& tile, int chunk, Range range, int64_t* offsets) const {
    const int size = cache_.block_size;
    const int64_t stride = static_cast<int64_t>(plan_.kv_heads) * plan_.dims;
    int64_t block = (static_cast<int64_t>(chunk) * kChunk + range.first) / size;
    int64_t within = (static_cast<int64_t>(chunk) * kChunk + range.first) % size;
    for (int position = range.first; position < range.end; ++block, within = 0) {
      const int64_t slot = static_cast<int64_t>(tile.blocks[block]) * size + within;
      const int begin = position;
      position = static_cast<int>(std::min<int64_t>(range.end, position + size - within));
      for (int i = begin; i < position; ++i) offsets[i] = (slot + i - begin) * stride;
    }
  }

  Softmax all(int head, int row) const {
    return all_.at(static_cast<int64_t>(head) * room_ + row, plan_.columns);
  }

  uint32_t* queries_at(int head, int row) const {
    return queries_ + (static_cast<int64_t>(head) * room_ + row) * at_.units;
  }

  // Where a row of the piece's kv head is among the numbers of all tokens [tokens, heads, dims].
  int64_t place_of(int head, int row) const {
    const int query_head = (piece_.head + head) * plan_.group + row % plan_.group;
    return (static_cast<int64_t>(row / plan_.group) * plan_.heads + query_head) * plan_.dims;
  }

  void clear() {
    const int64_t rows = static_cast<int64_t>(piece_.heads) * room_;
    std::fill_n(all_.sums, rows * plan_.columns, 0.0f);
    std::fill_n(all_.most, rows, kHidden);
    std::fill_n(all_.total, rows, 0.0f);
  }

  // Where the sums of a chunk go.
  Softmax sums_of(int chunk, int head, int row) const {
    return divided() ? plan_.partials(tile_, chunk, piece_.head + head).at(row, plan_.columns) : chunk_;
  }

  void join_rows(int head, int row, int count, const Softmax& sums) {
    if (divided()) return;
    for (int i = 0; i < count; ++i) {
      join(all(head, row + i), sums.at(i, plan_.columns), plan_.columns, scores_of_.factor);
    }
  }

  int last_row(int row) const { return std::min(row + kBlockRows, rows_) - 1; }

  // What a block's tokens see of a chunk, together.
  Range seen_by_block(int row, int chunk) const {
    return seen(row / plan_.group, last_row(row) / plan_.group, chunk);
  }

  // Of the vector of rows from `row` on. Rows beyond the last see what that one does.
  Sight sight(int row, int chunk) const {
    Sight sight{};
    for (int lane = 0; lane < kLanes; ++lane) {
      const int token = std::min(row + lane, rows_ - 1) / plan_.group;
      const Range own = seen(token, token, chunk);
      sight.first[lane] = own.first;
      sight.end[lane] = own.end;
    }
    sight.all_first = sight.first[kLanes - 1];
    sight.all_end = sight.end[0];
    return sight;
  }

  void join_chunks() {
    for (int chunk = 0; chunk < tile_.chunks; ++chunk) {
      for (int head = 0; head < piece_.heads; ++head) {
        const Softmax sums = plan_.partials(tile_, chunk, piece_.head + head);
        if (few()) {
          if (seen(0, 0, chunk).empty()) continue;
          for (int row = 0; row < rows_; ++row) {
            join(all(head, row), sums.at(row, plan_.columns), plan_.columns, scores_of_.factor);
          }
          continue;
        }
        for (int row = 0; row < rows_; row += kBlockRows) {
          if (seen_by_block(row, chunk).empty()) continue;
          join_lanes(all(head, row), sums.at(row, plan_.columns), plan_.dims, scores_of_.factor);
        }
      }
    }
  }

  void write(float* out) const {
    float* first = out + tile_.first * plan_.heads * plan_.dims;
    for (int head = 0; head < piece_.heads; ++head) {
      for (int row = 0; row < rows_; ++row) {
        const Softmax sums = all(head, row);
        float* to = first + place_of(head, row);
        const float factor = 1.0f / *sums.total;
        for (int i = 0; i < plan_.dims; ++i) to[i] = sums.sums[i] * factor;
      }
    }
  }

  void write_blocks(float* out) const {
    float* first = out + tile_.first * plan_.heads * plan_.dims;
    for (int head = 0; head < piece_.heads; ++head) {
      for (int row = 0; row < rows_; row += kBlockRows) {
        write_lanes(all(head, row), plan_.dims, [&](int lane) {
          return row + lane < rows_ ? first + place_of(head, row + lane) : nullptr;
        });
      }
    }
  }

  const AttentionPlan& plan_;
  const AttentionPiece& piece_;
  const AttentionShape& shape_;
  const Cache& cache_;
  const AttentionTile& tile_;
  const Scores scores_of_;
  const int rows_;
  const int64_t room_;
  const AttentionScratch at_;
  int64_t* offsets_;
  uint32_t* keys_;
  uint32_t* values_;
  uint32_t* queries_;
  float* scores_;
  Softmax all_;
  Softmax chunk_;
  float* spare_;
};

}  // namespace catenary
