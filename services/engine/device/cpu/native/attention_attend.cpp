// Attention over paged KV: one piece of a plan.
#include "attention.h"
#include "attention_packing.h"

namespace catenary {

namespace {

// Positions of a chunk, from its first one.
struct Range {
  int first;
  int end;
};

template <typename Cached>
class Piece {
 public:
  using Packed = PackedOf<Cached>;
  static constexpr int kInputs = Units<Packed>::kInputs;

  Piece(const AttentionPlan& plan, const AttentionPiece& piece, const AttentionShape& shape, const Cache& cache,
        char* scratch)
      : plan_(plan), piece_(piece), shape_(shape), cache_(cache), tile_(plan.tiles[piece.tile]),
        scores_of_(Scores::of(shape.scale, shape.softcap)), rows_(tile_.tokens * plan.group), at_(plan),
        slots_(reinterpret_cast<int64_t*>(scratch + at_.slots)),
        keys_(reinterpret_cast<uint32_t*>(scratch + at_.keys)),
        values_(reinterpret_cast<uint32_t*>(scratch + at_.values)),
        queries_(reinterpret_cast<uint32_t*>(scratch + at_.queries)),
        scores_(reinterpret_cast<float*>(scratch + at_.scores)),
        all_{reinterpret_cast<float*>(scratch + at_.sums), reinterpret_cast<float*>(scratch + at_.most),
             reinterpret_cast<float*>(scratch + at_.total)},
        chunk_{reinterpret_cast<float*>(scratch + at_.chunk_sums), reinterpret_cast<float*>(scratch + at_.chunk_most),
               reinterpret_cast<float*>(scratch + at_.chunk_total)} {}

  void run(const float* query, int64_t query_stride, float* out) {
    pack_queries(query, query_stride);
    clear();
    for (int chunk = piece_.chunk; chunk < piece_.chunk + piece_.chunks; ++chunk) {
      if (!seen_at_all(chunk)) continue;
      find_slots(chunk);
      for (int head = 0; head < piece_.heads; ++head) attend_to_chunk(head, chunk);
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

  // What tokens [first, last] of the tile see of a chunk, together.
  Range seen(int first, int last, int chunk) const {
    const int64_t begin = static_cast<int64_t>(chunk) * kChunk;
    const int64_t end = tile_.position + last + 1 - begin;
    const int64_t back = shape_.window > 0 ? tile_.position + first + 1 - shape_.window - begin : 0;
    return {static_cast<int>(std::clamp<int64_t>(back, 0, kChunk)), static_cast<int>(std::clamp<int64_t>(end, 0, kChunk))};
  }

  bool seen_at_all(int chunk) const {
    const Range range = seen(0, tile_.tokens - 1, chunk);
    return range.first < range.end;
  }

  Softmax all(int head, int row) const { return all_.at(static_cast<int64_t>(head) * rows_ + row, plan_.columns); }

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

  void find_slots(int chunk) {
    const Range range = seen(0, tile_.tokens - 1, chunk);
    const int size = cache_.block_size;
    int64_t block = (static_cast<int64_t>(chunk) * kChunk + range.first) / size;
    int64_t within = (static_cast<int64_t>(chunk) * kChunk + range.first) % size;
    for (int position = range.first; position < range.end; ++block, within = 0) {
      int64_t slot = static_cast<int64_t>(tile_.blocks[block]) * size + within;
      const int end = static_cast<int>(std::min<int64_t>(range.end, position + size - within));
      while (position < end) slots_[position++] = slot++;
    }
  }

  ChunkRows<Cached> rows_of(const void* cache, int head, Range range) const {
    const auto* elements = static_cast<const Cached*>(cache) + static_cast<int64_t>(piece_.head + head) * plan_.dims;
    return {elements, static_cast<int64_t>(plan_.kv_heads) * plan_.dims, slots_, range.first, range.end};
  }

  void attend_to_chunk(int head, int chunk) {
    const Range range = seen(0, tile_.tokens - 1, chunk);
    pack_keys(rows_of(cache_.key, head, range), at_.units, keys_);
    const ChunkRows<Cached> values = rows_of(cache_.value, head, range);
    // A weight of 0 hides a value from those tokens of the tile that do not see it, unless it is infinite or no number.
    const bool strange = tile_.tokens > 1 ? pack_values<true>(values, plan_.dims, at_.value_stride, values_)
                                          : pack_values<false>(values, plan_.dims, at_.value_stride, values_);
    for (int row = 0; row < rows_; row += kBlockRows) {
      attend_rows(head, chunk, row, std::min(kBlockRows, rows_ - row), strange);
    }
  }

  void attend_rows(int head, int chunk, int row, int count, bool strange) {
    const int group = plan_.group;
    const Range range = seen(row / group, (row + count - 1) / group, chunk);
    const Softmax sums = divided() ? plan_.partials(tile_, chunk, piece_.head + head).at(row, plan_.columns) : chunk_;
    if (range.first >= range.end) {
      std::fill_n(sums.total, count, 0.0f);
      return;
    }
    const uint32_t* queries = queries_ + (static_cast<int64_t>(head) * rows_ + row) * at_.units;
    const int64_t key_stride = static_cast<int64_t>(at_.units) * kWidth;
    multiply_panels<Packed>({queries, at_.units, keys_, key_stride}, count, at_.units,
                            range.first / kWidth * kWidth, range.end, scores_, kChunk);
    const int from = range.first / kLanes * kLanes, to = (range.end + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < count; ++i) {
      const Range own = seen((row + i) / group, (row + i) / group, chunk);
      float* scores = scores_ + static_cast<int64_t>(i) * kChunk;
      if (own.first < own.end) {
        soften<Packed>(scores_of_, scores, own.first, own.end, from, to, sums.most + i, sums.total + i);
      } else {
        hide<Packed>(scores, from, to, sums.most + i, sums.total + i);
      }
    }
    if (strange) {
      multiply_strange(head, chunk, row, count, sums);
    } else {
      multiply_values(0, count, range, sums);
    }
    if (divided()) return;
    for (int i = 0; i < count; ++i) {
      join(all(head, row + i), sums.at(i, plan_.columns), plan_.columns, scores_of_.factor);
    }
  }

  void multiply_values(int row, int count, Range range, const Softmax& sums) {
    const int first = range.first / kInputs, units = (range.end + kInputs - 1) / kInputs - first;
    const auto* weights = reinterpret_cast<const uint32_t*>(scores_) + static_cast<int64_t>(row) * kChunk + first;
    multiply_panels<Packed>({weights, kChunk, values_ + static_cast<int64_t>(first) * kWidth, at_.value_stride}, count,
                            units, 0, plan_.dims, sums.sums + static_cast<int64_t>(row) * plan_.columns,
                            plan_.columns);
  }

  // Each row by itself, with nothing packed but what it sees.
  void multiply_strange(int head, int chunk, int row, int count, const Softmax& sums) {
    for (int i = 0; i < count; ++i) {
      const Range own = seen((row + i) / plan_.group, (row + i) / plan_.group, chunk);
      if (own.first >= own.end) continue;
      pack_values<false>(rows_of(cache_.value, head, own), plan_.dims, at_.value_stride, values_);
      multiply_values(i, 1, own, sums);
    }
  }

  void join_chunks() {
    for (int chunk = 0; chunk < tile_.chunks; ++chunk) {
      if (!seen_at_all(chunk)) continue;
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
  int64_t* slots_;
  uint32_t* keys_;
  uint32_t* values_;
  uint32_t* queries_;
  float* scores_;
  Softmax all_;
  Softmax chunk_;
};

}  // namespace

void attend(
    const AttentionPlan& plan, int64_t piece, const AttentionShape& shape, const Cache& cache, const float* query,
    int64_t query_stride, float* out, void* scratch) {
  auto* bytes = static_cast<char*>(scratch);
  if (cache.kind == CacheKind::kFloat32) {
    Piece<float>(plan, plan.pieces[piece], shape, cache, bytes).run(query, query_stride, out);
  } else {
    Piece<Bf16>(plan, plan.pieces[piece], shape, cache, bytes).run(query, query_stride, out);
  }
}

}  // namespace catenary
