// Attention over paged KV: one piece of a plan.
#include "attention_few.h"
#include "attention_piece.h"

namespace catenary {

namespace {

// Positions that are read together, of all kv heads in turn, and how many such steps before they are asked
// for.
constexpr int kStep = 16;
constexpr int kAhead = 4;

template <typename Cached>
class Piece : PieceBase {
 public:
  using Packed = PackedOf<Cached>;
  static constexpr int kInputs = Units<Packed>::kInputs;

  using PieceBase::PieceBase;

  void run(const float* query, int64_t query_stride, float* out) {
    for (int head = 0; head < piece_.heads; ++head) {
      if (few()) {
        pack_rows(query, query_stride, head, 0, rows_, queries_at(head, 0));
      } else {
        pack_blocks(query, query_stride, head);
      }
    }
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
    if (few()) {
      write(out);
    } else {
      write_blocks(out);
    }
  }

 private:
  void pack_rows(const float* query, int64_t stride, int head, int first, int count, uint32_t* to) const {
    for (int row = first; row < first + count; ++row, to += at_.units) {
      const int query_head = (piece_.head + head) * plan_.group + row % plan_.group;
      const float* from = query + (tile_.first + row / plan_.group) * stride;
      from += static_cast<int64_t>(query_head) * plan_.dims;
      convert(from, plan_.dims, reinterpret_cast<Packed*>(to));
    }
  }

  // The room of the keys, which are packed later, holds a block as rows.
  void pack_blocks(const float* query, int64_t stride, int head) const {
    for (int row = 0; row < rows_; row += kBlockRows) {
      const int count = std::min(kBlockRows, rows_ - row);
      std::fill_n(keys_ + static_cast<int64_t>(count) * at_.units, (kBlockRows - count) * at_.units, 0u);
      pack_rows(query, stride, head, row, count, keys_);
      pack_lanes(reinterpret_cast<const Packed*>(keys_), at_.units, queries_at(head, row));
    }
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
    if (few()) return attend_few(now, next);
    for (int head = 0; head < piece_.heads; ++head) {
      pack_keys(keys_of(head, now), at_.units, keys_);
      const ChunkRows<Cached> values = values_of(head, now);
      // A weight of 0 hides a value from those tokens of the tile that do not see it, unless that is infinite
      // or no number.
      const bool strange = tile_.tokens > 1 ? pack_values<true>(values, at_.value_stride, values_)
                                            : pack_values<false>(values, at_.value_stride, values_);
      for (int row = 0; row < rows_; row += kBlockRows) attend_block(head, now, row, strange);
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

  void attend_block(int head, const Positions& now, int row, bool strange) {
    const Range range = seen_by_block(row, now.chunk);
    if (range.empty()) return;
    const Softmax sums = sums_of(now.chunk, head, row);
    multiply_block<Packed>(keys_, static_cast<int64_t>(at_.units) * kWidth, at_.units, range.first, range.end,
                           queries_at(head, row), scores_);
    const int from = range.first / kLanes * kLanes, to = (range.end + kLanes - 1) / kLanes * kLanes;
    for (int lane = 0; lane < kBlockRows; lane += kLanes) {
      soften_lanes<Packed>(scores_of_, sight(row + lane, now.chunk), from, to, scores_ + lane,
                           sums.most + lane, sums.total + lane);
    }
    if (strange) {
      multiply_strange(head, now, row, sums.sums);
    } else {
      multiply_values(range, sums.sums);
    }
    if (!divided()) join_lanes(all(head, row), sums, plan_.dims, scores_of_.factor);
  }

  void multiply_values(Range range, float* sums) const {
    const int first = range.first / kInputs, units = (range.end + kInputs - 1) / kInputs - first;
    const int64_t begin = first;
    const auto* weights = reinterpret_cast<const uint32_t*>(scores_) + begin * kBlockRows;
    multiply_block<Packed>(values_ + begin * kWidth, at_.value_stride, units, 0, plan_.dims, weights, sums);
  }

  // Each token by itself, with nothing packed but what it sees.
  void multiply_strange(int head, const Positions& now, int row, float* sums) {
    std::fill_n(sums, plan_.dims * kBlockRows, 0.0f);
    for (int token = row / plan_.group; token <= last_row(row) / plan_.group; ++token) {
      const Range own = seen(token, token, now.chunk);
      if (own.empty()) continue;
      pack_values<false>(rows_of(cache_.value, head, now, own), at_.value_stride, values_);
      multiply_values(own, spare_);
      const int begin = std::max(token * plan_.group, row) - row;
      const int end = std::min((token + 1) * plan_.group - 1, last_row(row)) + 1 - row;
      for (int dim = 0; dim < plan_.dims; ++dim) {
        std::copy(spare_ + dim * kBlockRows + begin, spare_ + dim * kBlockRows + end,
                  sums + dim * kBlockRows + begin);
      }
    }
  }

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
