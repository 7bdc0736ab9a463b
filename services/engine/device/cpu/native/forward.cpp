#include <cmath>
#include <new>

#include "pass.h"
#include "rows.h"

namespace catenary {

Pass::Pass(Decoder& decoder, void* hidden)
    : decoder_(decoder),
      team_(decoder.team_),
      sizes_(decoder.architecture_),
      batch_(decoder.batch_),
      hidden_(hidden),
      rows_(decoder.batch_.rows()),
      hidden_stride_(aligned_floats(sizes_.hidden)),
      fused_stride_(aligned_floats((sizes_.heads + 2 * sizes_.kv_heads) * sizes_.head_dim)),
      inner_stride_(aligned_floats(sizes_.intermediate)),
      residual_(decoder.rows_.residual.floats(0)),
      fused_(decoder.rows_.fused.floats(0)),
      mixed_(decoder.rows_.mixed.floats(0)),
      inner_(decoder.rows_.inner.floats(0)),
      delta_(decoder.rows_.delta.floats(0)),
      waves_(decoder.rows_.waves.floats(0)) {
  const int threads = decoder.team_.size();
  const int64_t count = static_cast<int64_t>(batch_.spans.size());
  plan_.reset(plan_attention(batch_.spans.data(), count, decoder.caches_[0], sizes_.heads, threads));
  if (plan_ == nullptr) throw std::bad_alloc();
  for (Own& own : decoder.own_) own.attention.reserve(attention_scratch(*plan_));
  decoder.foresee(rows_);
}

void Pass::run() {
  const Foresight foresight(team_, decoder_.aheads());
  team_.share_runs(rows_, [this](int64_t row, const Hand&) { embed(row); });
  for (int32_t index = 0; index < sizes_.layer_count; ++index) {
    const Layer& layer = decoder_.layers_[static_cast<size_t>(index)];
    attention(layer, decoder_.caches_[static_cast<size_t>(index)]);
    mlp(layer);
  }
  team_.share_runs(rows_, [this](int64_t row, const Hand& hand) { close(row, decoder_.own(hand).row.floats(0)); });
}

void Pass::embed(int64_t row) {
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
Operand Pass::make_operand(const Linear& linear, Make&& make) {
  return catenary::make_operand(team_, linear, rows_, decoder_.shared_operand(), decoder_.own_, make);
}

void Pass::product(const Linear& linear, const Operand& operand, const Result& result) {
  share_product(team_, linear, operand, rows_, products_++, [&](int) { return result; });
}

void Pass::attention(const Layer& layer, const Cache& cache) {
  const auto norm = [&](int64_t row, float* scratch) {
    rms_norm(residual(row), layer.attention_norm, sizes_.hidden, sizes_.norm_eps, scratch);
    return scratch;
  };
  const Result fused{Result::Way::kStore, Activation::kNone, 1.0f, fused_, fused_stride_};
  product(layer.qkv, make_operand(layer.qkv, norm), fused);
  team_.share_runs(rows_, [&](int64_t row, const Hand&) { turn(layer, cache, row); });
  const AttentionShape shape{sizes_.heads, sizes_.scale, layer.window, sizes_.attention_softcap};
  team_.share(attention_pieces(*plan_), [&](int64_t piece, const Hand& hand) {
    void* scratch = decoder_.own(hand).attention.reserve(0);
    attend(*plan_, piece, shape, cache, fused_, fused_stride_, mixed_, scratch);
  });
  const int64_t width = int64_t{sizes_.heads} * sizes_.head_dim;
  const auto mixed = [&](int64_t row, float*) { return mixed_ + row * width; };
  add_product(layer.output, make_operand(layer.output, mixed), layer.attention_post_norm);
}

// Norms and rotates a row's queries and keys, and puts keys and values into the cache.
void Pass::turn(const Layer& layer, const Cache& cache, int64_t row) {
  const int32_t dim = sizes_.head_dim, keys_end = sizes_.heads + sizes_.kv_heads;
  const Rope& rope = decoder_.ropes_[static_cast<size_t>(layer.rope)];
  const float* cosines = waves(layer.rope, row);
  float* heads = fused(row);
  for (int32_t head = 0; head < keys_end; ++head) {
    float* at = heads + int64_t{head} * dim;
    const float* norm = head < sizes_.heads ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) rms_norm(at, norm, dim, sizes_.norm_eps, at);
    rotate(at, cosines, cosines + rope.half, 2 * rope.half);
  }
  const float* keys = heads + int64_t{sizes_.heads} * dim;
  write_kv(cache, batch_.slots[static_cast<size_t>(row)], keys, keys + int64_t{sizes_.kv_heads} * dim);
}

void Pass::mlp(const Layer& layer) {
  if (layer.experts != nullptr) {
    const MixtureCall call{
        layer.experts, residual_, hidden_stride_, layer.mlp_norm, layer.mlp_post_norm, sizes_.norm_eps,
        sizes_.residual_multiplier, sizes_.activation};
    decoder_.mixture_.compute(team_, decoder_.own_, call, rows_);
    return;
  }
  const auto norm = [&](int64_t row, float* scratch) {
    rms_norm(residual(row), layer.mlp_norm, sizes_.hidden, sizes_.norm_eps, scratch);
    return scratch;
  };
  const Result gated{Result::Way::kGate, sizes_.activation, 1.0f, inner_, inner_stride_};
  product(layer.gate_up, make_operand(layer.gate_up, norm), gated);
  const auto inner = [&](int64_t row, float*) { return inner_ + row * inner_stride_; };
  add_product(layer.down, make_operand(layer.down, inner), layer.mlp_post_norm);
}

void Pass::add_product(const Linear& linear, const Operand& operand, const float* post_norm) {
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

void Pass::close(int64_t row, float* scratch) {
  rms_norm(residual(row), sizes_.norm, sizes_.hidden, sizes_.norm_eps, scratch);
  write_row(sizes_.kind, scratch, batch_.places[static_cast<size_t>(row)], sizes_.hidden, hidden_);
}

}  // namespace catenary
