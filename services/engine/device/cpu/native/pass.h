// One forward of a decoder.
#pragma once

#include <cstdint>
#include <memory>

#include "decoder.h"

namespace catenary {

struct FreePlan {
  void operator()(AttentionPlan* plan) const { free_plan(plan); }
};

class Pass {
 public:
  // hidden: see Decoder::prefill.
  Pass(Decoder& decoder, void* hidden);

  void run();

 private:
  void embed(int64_t row);
  void attention(const Layer& layer, const Cache& cache);
  void turn(const Layer& layer, const Cache& cache, int64_t row);
  void mlp(const Layer& layer);
  template <typename Make>
  Operand make_operand(const Linear& linear, Make&& make);
  void product(const Linear& linear, const Operand& operand, const Result& result);
  void add_product(const Linear& linear, const Operand& operand, const float* post_norm);
  void close(int64_t row, float* scratch);

  float* residual(int64_t row) const { return residual_ + row * hidden_stride_; }
  float* fused(int64_t row) const { return fused_ + row * fused_stride_; }
  // Cosines [half] and sines [half] of a row.
  float* waves(int32_t rope, int64_t row) const {
    return waves_ + (rope * rows_ + row) * 2 * decoder_.longest_wave_;
  }

  Decoder& decoder_;
  Team& team_;
  const Architecture& sizes_;
  const Batch& batch_;
  void* const hidden_;
  const int64_t rows_;
  const int64_t hidden_stride_;
  const int64_t fused_stride_;
  const int64_t inner_stride_;
  float* const residual_;
  float* const fused_;
  float* const mixed_;
  float* const inner_;
  float* const delta_;
  float* const waves_;
  std::unique_ptr<AttentionPlan, FreePlan> plan_;
  // Products that were computed.
  int64_t products_ = 0;
};

}  // namespace catenary
