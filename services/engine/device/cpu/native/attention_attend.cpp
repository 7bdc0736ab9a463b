// Attention over paged KV: one piece of a plan.
#include "attention.h"
#include "attention_few.h"
#include "attention_packing.h"

namespace catenary {

namespace {

// Positions that are read together, of all kv heads in turn, and how many such steps before they are asked
// for.
constexpr int kStep = 16;
constexpr int kAhead = 4;

// A chunk of which a piece sees something, and where its positions lie in the cache: elements from its begin.
struct Positions {
  const AttentionPiece* piece;
  int chunk;
  Range range;
  int64_t* offsets;
};

template <typename Cached>
class Piece {
 public:
  using Packed = PackedOf<Cached>;
  static constexpr int kInputs = Units<Packed>::kInputs;

  Piece(const AttentionPlan& plan, const AttentionPiece& piece, const AttentionShape& shape,
        const Cache& cache, char* scratch)
      : plan_(plan), piece_(piece), shape_(shape), cache_(cache), tile_(plan.tiles[piece.tile]),
        scores_of_(Scores::of(shape.scale, shape.softcap)), rows_(tile_.tokens * plan.group), at_(plan),
        offsets_(reinterpret_cast<int64_t*>(scratch + at_.offsets)),
        keys_(reinterpret_cast<uint32_t*>(scratch + at_.keys)),
        values_(reinterpret_cast<uint32_t*>(scratch + at_.values)),
        queries_(reinterpret_cast<uint32_t*>(scratch + at_.queries)),
        scores_(reinterpret_cast<float*>(scratch + at_.scores)),
        all_{reinterpret_cast<float*>(scratch + at_.sums), reinterpret_cast<float*>(scratch + at_.most),
             reinterpret_cast<float*>(scratch + at_.total)},
        chunk_{reinterpret_cast<float*>(scratch + at_.chunk_sums),
               reinterpret_cast<float*>(scratch + at_.chunk_most),
               reinterpret_cast<float*>(scratch + at_.chunk_total)} {}

  void run(const float* query, int64_t query_stride, float* out) {
    pack_queries(query, query_stride);
    clear();
    Positions now = positions(piece_, 0, offsets_), next{};
    while (now.piece == &piece_) {
      int64_t* offsets = now.offsets == offsets_ ? offsets_ + kChunk : offsets_;
      next = positions_after(now, offsets);
      attend_to_chunk(now, next);
      now = next;
    }
    if (divided()) {
      // Whoever is the last one joins what all have left.
      std::atomic<int32_t>& done = plan_.done[piece_.counter];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < piece_.parts) return;
      done.store(0, std::memory_order_relaxed);
      join_chunks();
    }
    write(out);
  }

 private:
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
    return all_.at(static_cast<int64_t>(head) * rows_ + row, plan_.columns);
  }

  void pack_queries(const float* query, int64_t stride) {
    auto* to = reinterpret_cast<Packed*>(queries_);
    for (int head = piece_.head; head < piece_.head + piece_.heads; ++head) {
      for (int token = 0; token < tile_.tokens; ++token) {
        const int64_t count = static_cast<int64_t>(plan_.group) * plan_.dims;
        convert(query + (tile_.first + token) * stride + head * count, count, to);
        to += count;
      }
    }
  }

  void clear() {
    const int64_t rows = static_cast<int64_t>(piece_.heads) * rows_;
    std::fill_n(all_.sums, rows * plan_.columns, 0.0f);
    std::fill_n(all_.most, rows, kHidden);
    std::fill_n(all_.total, rows, 0.0f);
  }

  ChunkRows<Cached> rows_of(const void* cache, int head, const Positions& at, Range range) const {
    const int64_t begin = static_cast<int64_t>(piece_.head + head) * plan_.dims;
    return {static_cast<const Cached*>(cache) + begin, at.offsets, plan_.dims, range};
  }

  ChunkRows<Cached> keys_of(int head, const Positions& at) const {
    return rows_of(cache_.key, head, at, at.range);
  }

  ChunkRows<Cached> values_of(int head, const Positions& at) const {
    return rows_of(cache_.value, head, at, at.range);
  }

  void attend_to_chunk(const Positions& now, const Positions& next) {
    if (few(plan_, piece_)) return attend_few(now, next);
    for (int head = 0; head < piece_.heads; ++head) {
      pack_keys(keys_of(head, now), at_.units, keys_);
      const ChunkRows<Cached> values = values_of(head, now);
      // A weight of 0 hides a value from those tokens of the tile that do not see it, unless that is infinite
      // or no number.
      const bool strange = tile_.tokens > 1 ? pack_values<true>(values, at_.value_stride, values_)
                                            : pack_values<false>(values, at_.value_stride, values_);
      for (int row = 0; row < rows_; row += kBlockRows) {
        attend_rows(head, now, row, std::min(kBlockRows, rows_ - row), strange);
      }
    }
  }

  // One token, all kv heads together: the cache is read in the order in which it lies in memory.
  void attend_few(const Positions& now, const Positions& next) {
    const Softmax sums = sums_of(now.chunk, 0, 0);
    const int begin = now.range.first / kStep * kStep, end = now.range.end;
    for (int first = begin; first < end; first += kStep) {
      for (int head = 0; head < piece_.heads; ++head) {
        ask_ahead(now, next, 0, (first - begin) / kStep, head);
        const int64_t row = static_cast<int64_t>(head) * rows_;
        score_few(rows_, keys_of(head, now), std::max(first, now.range.first / kLanes * kLanes),
                  std::min(first + kStep, end), queries_ + row * at_.units, at_.units,
                  scores_ + row * kChunk, kChunk);
      }
    }
    const int rows = piece_.heads * rows_;
    for (int row = 0; row < rows; ++row) {
      soften_row(row, 0, now.chunk, now.range, sums.at(row, plan_.columns));
    }
    std::fill_n(sums.sums, static_cast<int64_t>(rows) * plan_.columns, 0.0f);
    for (int first = begin; first < end; first += kStep) {
      for (int head = 0; head < piece_.heads; ++head) {
        ask_ahead(now, next, 1, (first - begin) / kStep, head);
        const int64_t row = static_cast<int64_t>(head) * rows_;
        sum_few(rows_, values_of(head, now), std::max(first, now.range.first), std::min(first + kStep, end),
                reinterpret_cast<const uint32_t*>(scores_ + row * kChunk), kChunk,
                sums.sums + row * plan_.columns, plan_.columns);
      }
    }
    join_rows(0, 0, rows, sums);
  }

  // Asks for what will be read kAhead steps after a step over a chunk's keys or values: they are read in
  // turn. Each of the piece's heads asks for some, so that memory and arithmetic are busy at the same time.
  void ask_ahead(const Positions& now, const Positions& next, int values, int step, int head) const {
    const int steps = (now.range.end + kStep - 1) / kStep - now.range.first / kStep;
    const int later = values * steps + step + kAhead;
    const bool here = later < 2 * steps;
    const Positions& then = here ? now : next;
    const int first = (then.range.first / kStep + (here ? later % steps : later - 2 * steps)) * kStep;
    const int first_head = here || !next.piece ? piece_.head : next.piece->head;
    const auto* cache = static_cast<const Cached*>(here && later >= steps ? cache_.value : cache_.key);
    const ChunkRows<Cached> rows{cache + static_cast<int64_t>(first_head) * plan_.dims, then.offsets,
                                 piece_.heads * plan_.dims, then.range};
    rows.ask(first + kStep * head / piece_.heads, first + kStep * (head + 1) / piece_.heads);
  }

  // Where the sums of a chunk go.
  Softmax sums_of(int chunk, int head, int row) const {
    return divided() ? plan_.partials(tile_, chunk, piece_.head + head).at(row, plan_.columns) : chunk_;
  }

  // Makes weights of a row of scores, which are there for `range`.
  void soften_row(int row, int token, int chunk, Range range, const Softmax& sums) {
    const int from = range.first / kLanes * kLanes, to = (range.end + kLanes - 1) / kLanes * kLanes;
    const Range own = seen(token, token, chunk);
    float* scores = scores_ + static_cast<int64_t>(row) * kChunk;
    if (own.empty()) {
      hide<Packed>(scores, from, to, sums.most, sums.total);
    } else {
      soften<Packed>(scores_of_, scores, own.first, own.end, from, to, sums.most, sums.total);
    }
  }

  void join_rows(int head, int row, int count, const Softmax& sums) {
    if (divided()) return;
    for (int i = 0; i < count; ++i) {
      join(all(head, row + i), sums.at(i, plan_.columns), plan_.columns, scores_of_.factor);
    }
  }

  void attend_rows(int head, const Positions& now, int row, int count, bool strange) {
    const Range range = seen(row / plan_.group, (row + count - 1) / plan_.group, now.chunk);
    const Softmax sums = sums_of(now.chunk, head, row);
    if (range.empty()) {
      std::fill_n(sums.total, count, 0.0f);
      return;
    }
    const uint32_t* queries = queries_ + (static_cast<int64_t>(head) * rows_ + row) * at_.units;
    const int64_t key_stride = static_cast<int64_t>(at_.units) * kWidth;
    multiply_panels<Packed>({queries, at_.units, keys_, key_stride}, count, at_.units,
                            range.first / kWidth * kWidth, range.end, scores_, kChunk);
    for (int i = 0; i < count; ++i) {
      soften_row(i, (row + i) / plan_.group, now.chunk, range, sums.at(i, plan_.columns));
    }
    if (strange) {
      multiply_strange(head, now, row, count, sums);
    } else {
      multiply_values(0, count, range, sums);
    }
    join_rows(head, row, count, sums);
  }

  void multiply_values(int row, int count, Range range, const Softmax& sums) {
    const int first = range.first / kInputs, units = (range.end + kInputs - 1) / kInputs - first;
    const int64_t begin = static_cast<int64_t>(row) * kChunk + first;
    const Factors factors{reinterpret_cast<const uint32_t*>(scores_) + begin, kChunk,
                          values_ + static_cast<int64_t>(first) * kWidth, at_.value_stride};
    multiply_panels<Packed>(factors, count, units, 0, plan_.dims,
                            sums.sums + static_cast<int64_t>(row) * plan_.columns, plan_.columns);
  }

  // Each row by itself, with nothing packed but what it sees.
  void multiply_strange(int head, const Positions& now, int row, int count, const Softmax& sums) {
    for (int i = 0; i < count; ++i) {
      const int token = (row + i) / plan_.group;
      const Range own = seen(token, token, now.chunk);
      if (own.empty()) continue;
      pack_values<false>(rows_of(cache_.value, head, now, own), at_.value_stride, values_);
      multiply_values(i, 1, own, sums);
    }
  }

  void join_chunks() {
    for (int chunk = 0; chunk < tile_.chunks; ++chunk) {
      const Range range = seen(0, tile_.tokens - 1, chunk);
      if (range.empty()) continue;
      for (int head = 0; head < piece_.heads; ++head) {
        const Softmax sums = plan_.partials(tile_, chunk, piece_.head + head);
        for (int row = 0; row < rows_; ++row) {
          join(all(head, row), sums.at(row, plan_.columns), plan_.columns, scores_of_.factor);
        }
      }
    }
  }

  void write(float* out) const {
    for (int head = 0; head < piece_.heads; ++head) {
      for (int row = 0; row < rows_; ++row) {
        const Softmax sums = all(head, row);
        const int64_t query_head = static_cast<int64_t>(piece_.head + head) * plan_.group + row % plan_.group;
        float* to = out + ((tile_.first + row / plan_.group) * plan_.heads + query_head) * plan_.dims;
        const float factor = 1.0f / *sums.total;
        for (int i = 0; i < plan_.dims; ++i) to[i] = sums.sums[i] * factor;
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
  const AttentionScratch at_;
  int64_t* offsets_;
  uint32_t* keys_;
  uint32_t* values_;
  uint32_t* queries_;
  float* scores_;
  Softmax all_;
  Softmax chunk_;
};

}  // namespace

void attend(
    const AttentionPlan& plan, int64_t piece, const AttentionShape& shape, const Cache& cache,
    const float* query, int64_t query_stride, float* out, void* scratch) {
  auto* bytes = static_cast<char*>(scratch);
  if (cache.kind == CacheKind::kFloat32) {
    Piece<float>(plan, plan.pieces[piece], shape, cache, bytes).run(query, query_stride, out);
  } else {
    Piece<Bf16>(plan, plan.pieces[piece], shape, cache, bytes).run(query, query_stride, out);
  }
}

}  // namespace catenary
