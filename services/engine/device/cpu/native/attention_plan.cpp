// Dividing the attention of a forward among threads.
#include <algorithm>
#include <new>

#include "attention.h"
#include "attention_packing.h"

namespace catenary {

namespace {

// Pieces for each thread: whoever is done early takes another.
constexpr int kPiecesEach = 4;

// What it costs to read and pack a position's key and value, in rows that attend to it.
constexpr int64_t kReading = 10;

int64_t work_of(const AttentionPlan& plan, const AttentionTile& tile) {
  const int64_t rows = static_cast<int64_t>(tile.tokens) * plan.group;
  return (static_cast<int64_t>(tile.position) + tile.tokens) * (kReading + rows) * plan.kv_heads;
}

// Sums of divided chunks take so many floats at the most (128 MiB): what goes beyond is not divided by
// chunks.
constexpr int64_t kMostPartials = int64_t{1} << 25;

void add_tiles(const Span& span, AttentionPlan& plan) {
  const int32_t most = std::max(1, kTileRows / plan.group);
  for (int32_t done = 0; done < span.tokens; done += most) {
    AttentionTile tile{};
    tile.first = span.first + done;
    tile.tokens = std::min(most, span.tokens - done);
    tile.position = span.context + done;
    tile.blocks = span.blocks;
    tile.chunks = (tile.position + tile.tokens + kChunk - 1) / kChunk;
    tile.partials = -1;
    plan.tiles.push_back(tile);
  }
}

// Divides one tile into about `wanted` pieces: by heads, and if that is not enough by chunks.
void add_pieces(AttentionPlan& plan, int32_t index, int64_t wanted, int64_t& partials, int32_t& counters) {
  AttentionTile& tile = plan.tiles[index];
  // A head of many tokens is a piece of its own: its sums then stay near.
  const int64_t by_heads = tile.tokens > 1 ? plan.kv_heads : std::min<int64_t>(wanted, plan.kv_heads);
  const int64_t needed = static_cast<int64_t>(tile.chunks) * plan.kv_heads * plan.room(tile);
  const bool fits = (partials + needed) * plan.columns <= kMostPartials;
  const int64_t parts = fits ? std::min<int64_t>(tile.chunks, (wanted + by_heads - 1) / by_heads) : 1;
  if (parts > 1) {
    tile.partials = partials;
    partials += needed;
  }
  for (int64_t i = 0; i < by_heads; ++i) {
    AttentionPiece piece{};
    piece.tile = index;
    piece.head = static_cast<int32_t>(plan.kv_heads * i / by_heads);
    piece.heads = static_cast<int32_t>(plan.kv_heads * (i + 1) / by_heads) - piece.head;
    piece.parts = static_cast<int32_t>(parts);
    piece.counter = parts > 1 ? counters++ : -1;
    const int64_t rows = piece.heads * plan.room(tile);
    plan.rows = std::max(plan.rows, rows);
    if (plan.few(tile)) plan.rows_at_once = std::max(plan.rows_at_once, rows);
    for (int64_t part = 0; part < parts; ++part) {
      piece.chunk = static_cast<int32_t>(tile.chunks * part / parts);
      piece.chunks = static_cast<int32_t>(tile.chunks * (part + 1) / parts) - piece.chunk;
      piece.work = work_of(plan, tile) * piece.heads * piece.chunks / (plan.kv_heads * tile.chunks);
      plan.pieces.push_back(piece);
    }
  }
}

void fill_plan(const Span* spans, int64_t count, int threads, AttentionPlan& plan) {
  for (int64_t i = 0; i < count; ++i) add_tiles(spans[i], plan);
  int64_t work = 0;
  for (const AttentionTile& tile : plan.tiles) work += work_of(plan, tile);
  const int64_t pieces = threads > 1 ? static_cast<int64_t>(threads) * kPiecesEach : 1;
  const int64_t each = std::max<int64_t>(1, work / pieces);
  int64_t partials = 0;
  int32_t counters = 0;
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const int64_t wanted = std::max<int64_t>(1, (work_of(plan, plan.tiles[i]) + each - 1) / each);
    add_pieces(plan, static_cast<int32_t>(i), pieces == 1 ? 1 : wanted, partials, counters);
  }
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(),
                   [](const AttentionPiece& a, const AttentionPiece& b) { return a.work > b.work; });
  plan.sums.reset(new float[partials * plan.columns]);
  plan.most.reset(new float[partials]);
  plan.total.reset(new float[partials]);
  plan.done.reset(new std::atomic<int32_t>[counters]());
}

}  // namespace

AttentionScratch::AttentionScratch(const AttentionPlan& plan) {
  int64_t end = 0;
  const auto take = [&end](int64_t items, int64_t item_bytes) {
    const int64_t at = end;
    end += (items * item_bytes + 63) / 64 * 64;
    return at;
  };
  const int inputs = plan.kind == CacheKind::kBfloat16 ? Units<PackedOf<Bf16>>::kInputs : 1;
  units = plan.dims / inputs;
  value_stride = static_cast<int64_t>(kChunk / inputs) * kWidth;
  offsets = take(2 * kChunk, sizeof(int64_t));
  keys = take(static_cast<int64_t>(kChunk) * units, 4);
  values = take((plan.dims + kWidth - 1) / kWidth * value_stride, 4);
  scores = take(plan.rows_at_once * kChunk, 4);
  queries = take(plan.rows * units, 4);
  sums = take(plan.rows * plan.columns, 4);
  most = take(plan.rows, 4);
  total = take(plan.rows, 4);
  chunk_sums = take(plan.rows_at_once * plan.columns, 4);
  chunk_most = take(plan.rows_at_once, 4);
  chunk_total = take(plan.rows_at_once, 4);
  spare = take(static_cast<int64_t>(plan.dims) * kBlockRows, 4);
  bytes = end;
}

bool attention_supported(const Cache& cache, int32_t heads) {
  const bool dims = cache.head_dim > 0 && cache.head_dim % 8 == 0 && cache.head_dim <= kMostDims;
  return dims && cache.kv_heads > 0 && heads > 0 && heads % cache.kv_heads == 0 && cache.block_size > 0;
}

AttentionPlan* plan_attention(
    const Span* spans, int64_t count, const Cache& cache, int32_t heads, int threads) {
  try {
    auto plan = std::make_unique<AttentionPlan>();
    plan->threads = std::max(1, threads);
    plan->heads = heads;
    plan->kv_heads = cache.kv_heads;
    plan->group = heads / cache.kv_heads;
    plan->dims = cache.head_dim;
    plan->columns = (cache.head_dim + kLanes - 1) / kLanes * kLanes;
    plan->kind = cache.kind;
    plan->rows_at_once = kBlockRows;
    fill_plan(spans, count, threads, *plan);
    return plan.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void free_plan(AttentionPlan* plan) { delete plan; }

int64_t attention_pieces(const AttentionPlan& plan) { return static_cast<int64_t>(plan.pieces.size()); }

int64_t attention_scratch(const AttentionPlan& plan) { return AttentionScratch(plan).bytes; }

}  // namespace catenary
