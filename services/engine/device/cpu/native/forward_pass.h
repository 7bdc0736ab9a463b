// One forward of a decoder.
//
// All rows go through all layers, or, where few hidden states are wanted, through all but the last one: of
// that all get their keys and values, and the selected ones what follows.
#pragma once

#include <cstdint>
#include <memory>

#include "decoder.h"

namespace catenary {

struct FreePlan {
  void operator()(AttentionPlan* plan) const { free_plan(plan); }
};

using Plan = std::unique_ptr<AttentionPlan, FreePlan>;

class ForwardPass {
 public:
  // hidden: see Decoder::prefill; if there is `sound`, both: see Decoder::select.
  ForwardPass(Decoder& decoder, void* hidden, uint8_t* sound);

  void run();

 private:
  Plan make_plan(const std::vector<Span>& spans) const;
  void embed(int64_t row);
  void heads(const Layer& layer, const Cache& cache);
  void last_heads(const Layer& layer, const Cache& cache);
  void narrow();
  void turn(const Layer& layer, int64_t row, float* heads, int32_t first, int32_t end);
  void store(const Cache& cache, int64_t row);
  bool is_sound(const Cache& cache, int64_t row, float* scratch) const;
  void attention(const Layer& layer, const Cache& cache);
  void mlp(const Layer& layer);
  template <typename Make>
  Operand make_operand(const Linear& linear, Make&& make);
  void product(const Linear& linear, const Operand& operand, const Result& result);
  void add_product(const Linear& linear, const Operand& operand, const float* post_norm);
  Operand make_normed(const Linear& linear, const float* norm);
  void close(int64_t row, float* scratch);

  float* residual(int64_t row) const { return residual_ + row * hidden_stride_; }
  float* fused(int64_t row) const { return fused_ + row * fused_stride_; }
  // Cosines [half] and sines [half] of a row.
  float* waves(int32_t rope, int64_t row) const {
    return waves_ + (rope * batch_.rows() + row) * 2 * decoder_.longest_wave_;
  }

  Decoder& decoder_;
  Team& team_;
  const Architecture& sizes_;
  const Batch& batch_;
  void* const hidden_;
  uint8_t* const sound_;
  const int64_t hidden_stride_;
  const int64_t fused_stride_;
  const int64_t inner_stride_;
  float* const mixed_;
  float* const inner_;
  float* const delta_;
  float* const waves_;
  // Of the rows that go on: all of the batch, or in the last layer the selected ones.
  int64_t rows_;
  float* residual_;
  float* fused_;
  Plan plan_;
  // Products that were computed.
  int64_t products_ = 0;
};

}  // namespace catenary
