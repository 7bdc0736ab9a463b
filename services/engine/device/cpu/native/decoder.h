// The standard decoder: what it is made of, and its forward in one call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "batch.h"
#include "buffer.h"
#include "experts.h"
#include "kernels.h"
#include "linear.h"
#include "team.h"

namespace catenary {

// Inverse frequencies float32 [half] of a rotary embedding, and the factor on its cosines and sines.
struct Rope {
  const float* frequencies;
  int32_t half;
  float factor;
};

// A layer's weights. Norms are float32; null where the architecture has none.
struct Layer {
  Linear qkv;
  Linear output;
  Linear gate_up;
  Linear down;
  const float* attention_norm;
  const float* attention_post_norm;
  const float* mlp_norm;
  const float* mlp_post_norm;
  const float* query_norm;
  const float* key_norm;
  int32_t rope;
  // How many positions it looks back, 0: all.
  int32_t window;
  // Null, or what computes instead of gate_up and down, which are empty then.
  const Experts* experts;
};

// The architecture, as DecoderSpec has it. `kind`: of the embedding [vocab, hidden], the KV and the hidden
// states. embedding null: its rows are those of the head, which is not quantized then. A head without outputs
// is none.
struct Architecture {
  CacheKind kind;
  Activation activation;
  int32_t vocab;
  int32_t hidden;
  int32_t intermediate;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t layer_count;
  int32_t rope_count;
  float norm_eps;
  float scale;
  // 0: none.
  float attention_softcap;
  float logits_softcap;
  float embedding_multiplier;
  float residual_multiplier;
  float logits_divisor;
  const void* embedding;
  const float* norm;
  Linear head;
  const Layer* layers;
  const Rope* ropes;
};

// A layer's keys and values [slots, kv_heads, head_dim].
struct Pages {
  void* key;
  void* value;
};

// Rows of a decode, the first `rows` of them, that take their best tokens, scores float32 [rows] beside them.
// last_tokens [places]: row r's is last_tokens[last_rows[r]]. It is what the row is given where that is no
// token, and what it finds is kept there.
struct Following {
  int64_t rows;
  int64_t places;
  const int64_t* last_rows;
  int64_t* last_tokens;
  int64_t* tokens;
  float* scores;

  // The tokens of all rows of the arguments. False for numbers that do not fit.
  bool resolve(const DecodeArguments& arguments, std::vector<int64_t>* given) const;
};

// Forwards of one model, one at a time. Holds no weights: the host keeps what the architecture points to.
class Decoder {
 public:
  Decoder(const Architecture& architecture, Team& team);

  // Before the first forward. `pages`: one entry for each layer.
  void attach(const Pages* pages, int64_t block_size, int64_t blocks);

  // Zeroes blocks in all layers. The padding block, which no forward reads or writes, is passed over.
  Fault clear(const int64_t* blocks, int64_t count);

  // Hidden states [rows of the arguments, hidden] after the final norm; zero for padding.
  Fault prefill(const PrefillArguments& arguments, void* hidden);
  Fault decode(const DecodeArguments& arguments, void* hidden);

  // A prefill of which `count` tokens' hidden states are wanted, by their places among the arguments' tokens:
  // hidden [count, hidden]. sound [rows of the arguments]: 1, or 0 for a token whose keys or values are not
  // all finite.
  Fault select(
      const PrefillArguments& arguments, const int64_t* places, int64_t count, void* hidden, uint8_t* sound);

  // hidden [rows, hidden] -> scores float32 [rows, vocab].
  Fault logits(const void* hidden, int64_t rows, float* scores);

  // The first of each row's best scores, and what it is; -inf if all are, and no number if one of the row is
  // none. Exactly what one would find among `logits`, of which none is kept.
  Fault choose(const void* hidden, int64_t rows, int64_t* tokens, float* scores);

  // `decode`, then `choose` of as many of its hidden states as follow.
  Fault decode_best(const DecodeArguments& arguments, const Following& following, void* hidden);

  int64_t scratch_bytes() const;

 private:
  // Of a layer, in the order in which they are computed: qkv, output, gate_up, down.
  static constexpr int64_t kProducts = 4;

  friend class ForwardPass;
  friend class HeadPass;

  Fault forward(int64_t places, void* hidden);
  void make_room(int64_t rows, int64_t selected);
  // Lays out what threads will read of all layers and the head, for so many rows.
  void foresee(int64_t rows);
  Operand shared_operand();
  Own& own(const Hand& hand) { return own_[static_cast<size_t>(hand.rank)]; }
  // Of all threads; null if nothing is known.
  Prefetch* aheads() { return aheads_[0].empty() ? nullptr : aheads_.data(); }

  Architecture architecture_;
  Team& team_;
  std::vector<Layer> layers_;
  std::vector<Rope> ropes_;
  std::vector<Cache> caches_;
  Paging paging_{};
  Batch batch_;
  std::vector<int64_t> given_;

  // Bytes of the longest operand row, and floats of the longest row that one is made of.
  int64_t operand_bytes_ = 0;
  int64_t longest_row_ = 0;
  int32_t longest_wave_ = 0;
  // Of all threads, by rows of the batch.
  struct Rows {
    Buffer residual, fused, mixed, inner, delta, waves, operand, scales;
    // Of rows that are selected.
    Buffer last_residual, last_fused;
  } rows_;
  std::vector<Own> own_;
  Mixture mixture_;
  // What each thread will read, laid out for so many rows.
  std::vector<Prefetch> aheads_;
  int64_t foreseen_ = 0;
};

}  // namespace catenary
