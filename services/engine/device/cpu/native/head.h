// The scores of a decoder's hidden states.
#pragma once

#include <cstdint>

#include "decoder.h"

namespace catenary {

class HeadPass {
 public:
  // See Decoder::logits, and Decoder::choose if there are `tokens`.
  HeadPass(Decoder& decoder, const void* hidden, int64_t rows, int64_t* tokens, float* scores);

  void run();

 private:
  void find_best(const Operand& operand, int64_t nth);
  void finish(int64_t row);
  void choose(int64_t row);

  Decoder& decoder_;
  const Architecture& sizes_;
  const void* const hidden_;
  const int64_t rows_;
  int64_t* const tokens_;
  float* const scores_;
};

}  // namespace catenary
