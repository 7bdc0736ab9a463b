#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "head.h"
#include "forward_pass.h"
#include "rows.h"

namespace catenary {

namespace {

// Zeroes blocks in all caches.
struct Clearing {
  const Cache* caches;
  int64_t cache_count;
  const int64_t* blocks;
  int64_t count;
  int64_t padding;
  int64_t block_bytes;

  void compute(Team& team) const {
    team.share(2 * cache_count, [this](int64_t item, const Hand&) {
      const Cache& cache = caches[item / 2];
      char* pages = static_cast<char*>(item % 2 == 0 ? cache.key : cache.value);
      for (int64_t index = 0; index < count; ++index) {
        if (blocks[index] == padding) continue;
        std::memset(pages + blocks[index] * block_bytes, 0, static_cast<size_t>(block_bytes));
      }
    });
  }
};

}  // namespace

Decoder::Decoder(const Architecture& architecture, Team& team)
    : architecture_(architecture),
      team_(team),
      layers_(architecture.layers, architecture.layers + architecture.layer_count),
      ropes_(architecture.ropes, architecture.ropes + architecture.rope_count),
      own_(static_cast<size_t>(team.size())),
      aheads_(static_cast<size_t>(team.size())) {
  const auto measure = [this](const Linear& linear) {
    operand_bytes_ = std::max(operand_bytes_, operand_stride(linear.kind, linear.inputs));
    longest_row_ = std::max(longest_row_, int64_t{linear.inputs});
  };
  measure(architecture.head);
  for (const Layer& layer : layers_) {
    for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) measure(*linear);
    if (layer.experts == nullptr) continue;
    const Experts& experts = *layer.experts;
    for (const Linear* linear : {&experts.router, experts.gate_up, experts.down}) measure(*linear);
  }
  for (const Rope& rope : ropes_) longest_wave_ = std::max(longest_wave_, rope.half);
  for (Own& own : own_) {
    own.row.floats(longest_row_);
  }
}

void Decoder::attach(const Pages* pages, int64_t block_size, int64_t blocks) {
  paging_ = {block_size, blocks, block_size * blocks};
  caches_.clear();
  for (int32_t layer = 0; layer < architecture_.layer_count; ++layer) {
    caches_.push_back(
        {architecture_.kind, static_cast<int32_t>(block_size), architecture_.kv_heads, architecture_.head_dim,
         pages[layer].key, pages[layer].value});
  }
}

Fault Decoder::clear(const int64_t* blocks, int64_t count) {
  for (int64_t index = 0; index < count; ++index) {
    if (blocks[index] < 0 || blocks[index] > paging_.blocks) return Fault::kBlock;
  }
  const int64_t numbers = int64_t{architecture_.kv_heads} * architecture_.head_dim;
  const int64_t token = numbers * item_size(architecture_.kind);
  Clearing clearing{caches_.data(), static_cast<int64_t>(caches_.size()), blocks, count, paging_.blocks,
                    paging_.block_size * token};
  // The first time the system has to find memory for it, which takes far longer than to write.
  clearing.compute(team_);
  return Fault::kNone;
}

Fault Decoder::prefill(const PrefillArguments& arguments, void* hidden) {
  const Fault fault = batch_.read(arguments, paging_, architecture_.vocab);
  return fault == Fault::kNone ? forward(arguments.rows * arguments.query, hidden) : fault;
}

Fault Decoder::select(
    const PrefillArguments& arguments, const int64_t* places, int64_t count, void* hidden, uint8_t* sound) {
  Fault fault = batch_.read(arguments, paging_, architecture_.vocab);
  if (fault == Fault::kNone) fault = batch_.select(places, count);
  if (fault != Fault::kNone) return fault;
  std::fill_n(sound, arguments.rows * arguments.query, uint8_t{1});
  if (batch_.rows() == 0) return Fault::kNone;
  // A place may be wanted more than once.
  make_room(std::max(batch_.rows(), count), count);
  ForwardPass(*this, hidden, sound).run();
  return Fault::kNone;
}

Fault Decoder::decode(const DecodeArguments& arguments, void* hidden) {
  const Fault fault = batch_.read(arguments, paging_, architecture_.vocab);
  return fault == Fault::kNone ? forward(arguments.rows, hidden) : fault;
}

Fault Decoder::forward(int64_t places, void* hidden) {
  if (batch_.rows() < places) {
    const int64_t bytes = places * architecture_.hidden * item_size(architecture_.kind);
    std::memset(hidden, 0, static_cast<size_t>(bytes));
  }
  if (batch_.rows() == 0) return Fault::kNone;
  make_room(batch_.rows(), 0);
  ForwardPass(*this, hidden, nullptr).run();
  return Fault::kNone;
}

Fault Decoder::logits(const void* hidden, int64_t rows, float* scores) {
  if (rows == 0) return Fault::kNone;
  rows_.operand.reserve(rows * operand_bytes_);
  rows_.scales.floats(rows);
  HeadPass(*this, hidden, rows, nullptr, scores).run();
  return Fault::kNone;
}

Fault Decoder::choose(const void* hidden, int64_t rows, int64_t* tokens, float* scores) {
  if (rows == 0) return Fault::kNone;
  rows_.operand.reserve(rows * operand_bytes_);
  rows_.scales.floats(rows);
  for (Own& own : own_) own.best.reserve(rows * kBestBytes);
  HeadPass(*this, hidden, rows, tokens, scores).run();
  return Fault::kNone;
}

void Decoder::make_room(int64_t rows, int64_t selected) {
  const Architecture& sizes = architecture_;
  const int64_t hidden_stride = aligned_floats(sizes.hidden);
  const int64_t fused_stride = aligned_floats((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim);
  rows_.residual.floats(rows * hidden_stride);
  rows_.delta.floats(rows * hidden_stride);
  rows_.fused.floats(rows * fused_stride);
  rows_.last_residual.floats(selected * hidden_stride);
  rows_.last_fused.floats(selected * fused_stride);
  rows_.mixed.floats(rows * sizes.heads * sizes.head_dim);
  rows_.inner.floats(rows * aligned_floats(sizes.intermediate));
  rows_.waves.floats(rows * sizes.rope_count * 2 * longest_wave_);
  rows_.operand.reserve(rows * operand_bytes_);
  rows_.scales.floats(rows);
  for (const Layer& layer : layers_) {
    if (layer.experts != nullptr) mixture_.make_room(*layer.experts, rows);
  }
}

void Decoder::foresee(int64_t rows) {
  for (size_t rank = 0; rank < aheads_.size(); ++rank) {
    Prefetch& ahead = aheads_[rank];
    ahead.restart();
    if (foreseen_ == rows) continue;
    ahead.clear();
    const auto add = [&](const Linear& linear) {
      return catenary::foresee(linear, rows, static_cast<int>(rank), team_.size(), ahead);
    };
    bool known = true;
    for (const Layer& layer : layers_) {
      // Which experts will be read is not known before.
      known = known && layer.experts == nullptr;
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        known = known && add(*linear);
      }
    }
    if (architecture_.head.outputs > 0) known = known && add(architecture_.head);
    if (!known) ahead.clear();
  }
  foreseen_ = rows;
}

Operand Decoder::shared_operand() {
  return {rows_.operand.reserve(0), 0, rows_.scales.floats(0)};
}

int64_t Decoder::scratch_bytes() const {
  const auto size_of = [](const Own& own) {
    return own.row.size() + own.attention.size() + own.best.size();
  };
  int64_t total = mixture_.bytes();
  for (const Own& own : own_) total += size_of(own);
  for (const Buffer* buffer :
       {&rows_.residual, &rows_.fused, &rows_.mixed, &rows_.inner, &rows_.delta, &rows_.waves, &rows_.operand,
        &rows_.scales, &rows_.last_residual, &rows_.last_fused}) {
    total += buffer->size();
  }
  return total;
}

}  // namespace catenary
