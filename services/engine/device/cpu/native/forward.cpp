#include <algorithm>
#include <cmath>
#include <new>

#include "forward_pass.h"
#include "rows.h"

namespace catenary {

ForwardPass::ForwardPass(Decoder& decoder, void* hidden, uint8_t* sound)
    : decoder_(decoder),
      team_(decoder.team_),
      sizes_(decoder.architecture_),
      batch_(decoder.batch_),
      hidden_(hidden),
      sound_(sound),
      hidden_stride_(aligned_floats(sizes_.hidden)),
      fused_stride_(aligned_floats((sizes_.heads + 2 * sizes_.kv_heads) * sizes_.head_dim)),
      inner_stride_(aligned_floats(sizes_.intermediate)),
      mixed_(decoder.rows_.mixed.floats(0)),
      inner_(decoder.rows_.inner.floats(0)),
      delta_(decoder.rows_.delta.floats(0)),
      waves_(decoder.rows_.waves.floats(0)),
      rows_(decoder.batch_.rows()),
      residual_(decoder.rows_.residual.floats(0)),
      fused_(decoder.rows_.fused.floats(0)),
      plan_(make_plan(batch_.spans)) {
  decoder.foresee(rows_);
}

Plan ForwardPass::make_plan(const std::vector<Span>& spans) const {
  const int64_t count = static_cast<int64_t>(spans.size());
  Plan plan(plan_attention(spans.data(), count, decoder_.caches_[0], sizes_.heads, team_.size()));
  if (plan == nullptr) throw std::bad_alloc();
  for (Own& own : decoder_.own_) own.attention.reserve(attention_scratch(*plan));
  return plan;
}

void ForwardPass::run() {
  // Where rows are selected, what is foreseen of the last layer is not what they read; nobody but time
  // depends on it.
  const Foresight foresight(team_, decoder_.aheads());
  team_.share_runs(rows_, [this](int64_t row, const Hand&) { embed(row); });
  for (int32_t index = 0; index < sizes_.layer_count; ++index) {
    const Layer& layer = decoder_.layers_[static_cast<size_t>(index)];
    const Cache& cache = decoder_.caches_[static_cast<size_t>(index)];
    if (sound_ == nullptr || index + 1 < sizes_.layer_count) {
      heads(layer, cache);
    } else {
      last_heads(layer, cache);
      if (rows_ == 0) return;
    }
    attention(layer, cache);
    mlp(layer);
  }
  team_.share_runs(rows_, [this](int64_t row, const Hand& hand) {
    close(row, decoder_.own(hand).row.floats(0));
  });
}

void ForwardPass::embed(int64_t row) {
  const size_t index = static_cast<size_t>(row);
  const float multiplier = sizes_.embedding_multiplier;
  if (sizes_.embedding == nullptr) {
    unpack_row(sizes_.head, batch_.tokens[index], multiplier, residual(row));
  } else {
    read_row(sizes_.kind, sizes_.embedding, batch_.tokens[index], sizes_.hidden, multiplier, residual(row));
  }
  const float position = static_cast<float>(batch_.positions[index]);
  for (int32_t rope = 0; rope < sizes_.rope_count; ++rope) {
    const Rope& from = decoder_.ropes_[static_cast<size_t>(rope)];
    float* to = waves(rope, row);
    for (int32_t pair = 0; pair < from.half; ++pair) {
      const float angle = position * from.frequencies[pair];
      to[pair] = std::cos(angle) * from.factor;
      to[from.half + pair] = std::sin(angle) * from.factor;
    }
  }
}

template <typename Make>
Operand ForwardPass::make_operand(const Linear& linear, Make&& make) {
  return catenary::make_operand(team_, linear, rows_, decoder_.shared_operand(), decoder_.own_, make);
}

void ForwardPass::product(const Linear& linear, const Operand& operand, const Result& result) {
  share_product(team_, linear, operand, rows_, products_++, [&](int) { return result; });
}

Operand ForwardPass::make_normed(const Linear& linear, const float* norm) {
  return make_operand(linear, [&](int64_t row, float* scratch) {
    rms_norm(residual(row), norm, sizes_.hidden, sizes_.norm_eps, scratch);
    return scratch;
  });
}

// Queries, keys and values of all rows; keys and values go into the cache.
void ForwardPass::heads(const Layer& layer, const Cache& cache) {
  const Operand operand = make_normed(layer.qkv, layer.attention_norm);
  product(layer.qkv, operand, {Result::Way::kStore, Activation::kNone, 1.0f, fused_, fused_stride_});
  team_.share_runs(rows_, [&](int64_t row, const Hand&) {
    turn(layer, row, fused(row), 0, sizes_.heads + sizes_.kv_heads);
    store(cache, row);
  });
}

// Keys and values of all rows, and queries of those that go on from here: the selected ones.
void ForwardPass::last_heads(const Layer& layer, const Cache& cache) {
  const int32_t queries = sizes_.heads * sizes_.head_dim, from = queries / kPanel * kPanel;
  const Linear keys_values = part_of(layer.qkv, from, layer.qkv.outputs);
  const Operand operand = make_normed(keys_values, layer.attention_norm);
  product(keys_values, operand, {Result::Way::kStore, Activation::kNone, 1.0f, fused_ + from, fused_stride_});
  team_.share_runs(rows_, [&](int64_t row, const Hand& hand) {
    turn(layer, row, fused(row), sizes_.heads, sizes_.heads + sizes_.kv_heads);
    store(cache, row);
    sound_[batch_.places[static_cast<size_t>(row)]] = is_sound(cache, row, decoder_.own(hand).row.floats(0));
  });
  narrow();
  if (rows_ == 0) return;
  const Linear only_queries = part_of(layer.qkv, 0, queries);
  const Operand asking = make_normed(only_queries, layer.attention_norm);
  product(only_queries, asking, {Result::Way::kStore, Activation::kNone, 1.0f, fused_, fused_stride_});
  for (int64_t row = 0; row < rows_; ++row) {
    turn(layer, batch_.selected[static_cast<size_t>(row)], fused(row), 0, sizes_.heads);
  }
}

// From here on rows are the selected ones.
void ForwardPass::narrow() {
  const float* all = residual_;
  rows_ = static_cast<int64_t>(batch_.selected.size());
  residual_ = decoder_.rows_.last_residual.floats(0);
  fused_ = decoder_.rows_.last_fused.floats(0);
  plan_ = make_plan(batch_.selected_spans);
  for (int64_t row = 0; row < rows_; ++row) {
    const int64_t selected = batch_.selected[static_cast<size_t>(row)];
    std::copy_n(all + selected * hidden_stride_, sizes_.hidden, residual(row));
  }
}

// Norms and rotates heads [first, end) of a row of the batch: queries, then keys.
void ForwardPass::turn(const Layer& layer, int64_t row, float* heads, int32_t first, int32_t end) {
  const int32_t dim = sizes_.head_dim;
  const Rope& rope = decoder_.ropes_[static_cast<size_t>(layer.rope)];
  const float* cosines = waves(layer.rope, row);
  for (int32_t head = first; head < end; ++head) {
    float* at = heads + int64_t{head} * dim;
    const float* norm = head < sizes_.heads ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) rms_norm(at, norm, dim, sizes_.norm_eps, at);
    rotate(at, cosines, cosines + rope.half, 2 * rope.half);
  }
}

// Puts a row's keys and values into the cache.
void ForwardPass::store(const Cache& cache, int64_t row) {
  const float* keys = fused(row) + int64_t{sizes_.heads} * sizes_.head_dim;
  const float* values = keys + int64_t{sizes_.kv_heads} * sizes_.head_dim;
  write_kv(cache, batch_.slots[static_cast<size_t>(row)], keys, values);
}

// Whether the cache holds finite keys and values of a row.
bool ForwardPass::is_sound(const Cache& cache, int64_t row, float* scratch) const {
  const int64_t slot = batch_.slots[static_cast<size_t>(row)];
  const int64_t width = int64_t{sizes_.kv_heads} * sizes_.head_dim;
  float nothing = 0.0f;
  for (const void* numbers : {cache.key, cache.value}) {
    read_row(cache.kind, numbers, slot, width, 0.0f, scratch);
    for (int64_t i = 0; i < width; ++i) nothing += scratch[i];
  }
  return nothing == 0.0f;
}

void ForwardPass::attention(const Layer& layer, const Cache& cache) {
  const AttentionShape shape{sizes_.heads, sizes_.scale, layer.window, sizes_.attention_softcap};
  team_.share(attention_pieces(*plan_), [&](int64_t piece, const Hand& hand) {
    void* scratch = decoder_.own(hand).attention.reserve(0);
    attend(*plan_, piece, shape, cache, fused_, fused_stride_, mixed_, scratch);
  });
  const int64_t width = int64_t{sizes_.heads} * sizes_.head_dim;
  const auto mixed = [&](int64_t row, float*) { return mixed_ + row * width; };
  add_product(layer.output, make_operand(layer.output, mixed), layer.attention_post_norm);
}

void ForwardPass::mlp(const Layer& layer) {
  if (layer.experts != nullptr) {
    const MixtureCall call{
        layer.experts, residual_, hidden_stride_, layer.mlp_norm, layer.mlp_post_norm, sizes_.norm_eps,
        sizes_.residual_multiplier, sizes_.activation};
    decoder_.mixture_.compute(team_, decoder_.own_, call, rows_);
    return;
  }
  const Result gated{Result::Way::kGate, sizes_.activation, 1.0f, inner_, inner_stride_};
  product(layer.gate_up, make_normed(layer.gate_up, layer.mlp_norm), gated);
  const auto inner = [&](int64_t row, float*) { return inner_ + row * inner_stride_; };
  add_product(layer.down, make_operand(layer.down, inner), layer.mlp_post_norm);
}

void ForwardPass::add_product(const Linear& linear, const Operand& operand, const float* post_norm) {
  const float factor = sizes_.residual_multiplier;
  if (post_norm == nullptr) {
    product(linear, operand, {Result::Way::kAdd, Activation::kNone, factor, residual_, hidden_stride_});
    return;
  }
  product(linear, operand, {Result::Way::kStore, Activation::kNone, 1.0f, delta_, hidden_stride_});
  team_.share_runs(rows_, [&](int64_t row, const Hand&) {
    float* at = delta_ + row * hidden_stride_;
    rms_norm(at, post_norm, sizes_.hidden, sizes_.norm_eps, at);
    add_row(at, sizes_.hidden, factor, residual(row));
  });
}

void ForwardPass::close(int64_t row, float* scratch) {
  rms_norm(residual(row), sizes_.norm, sizes_.hidden, sizes_.norm_eps, scratch);
  const int64_t place = sound_ == nullptr ? batch_.places[static_cast<size_t>(row)] : row;
  write_row(sizes_.kind, scratch, place, sizes_.hidden, hidden_);
}

}  // namespace catenary
