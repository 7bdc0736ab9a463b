#include "head.h"

#include "rows.h"

namespace catenary {

namespace {

F32 finished(F32 scores, float divisor, float cap) {
  scores = scores / divisor;
  return cap > 0 ? cap * tanh(scores / cap) : scores;
}

}  // namespace

HeadPass::HeadPass(Decoder& decoder, const void* hidden, int64_t rows, float* scores)
    : decoder_(decoder), sizes_(decoder.architecture_), hidden_(hidden), rows_(rows), scores_(scores) {}

void HeadPass::run() {
  decoder_.team_.run([](void* pass, Worker& worker) { static_cast<HeadPass*>(pass)->compute(worker); }, this);
}

void HeadPass::compute(Worker& worker) {
  Own& own = decoder_.own_[static_cast<size_t>(worker.rank())];
  const auto widened = [&](int64_t row, float* scratch) {
    read_row(sizes_.kind, hidden_, row, sizes_.hidden, 1.0f, scratch);
    return scratch;
  };
  const Operand operand = make_operand(worker, sizes_.head, rows_, decoder_.shared_operand(), own, widened);
  const Result result{Result::Way::kStore, Activation::kNone, 1.0f, scores_, sizes_.vocab};
  share_product(worker, sizes_.head, operand, rows_, decoder_.team_.size(), result);
  if (sizes_.logits_divisor != 1.0f || sizes_.logits_softcap > 0) {
    worker.share(rows_, [&](int64_t row) { finish(row); });
  }
}

void HeadPass::finish(int64_t row) {
  float* scores = scores_ + row * sizes_.vocab;
  const float divisor = sizes_.logits_divisor, cap = sizes_.logits_softcap;
  int64_t at = 0;
  for (; at + kLanes <= sizes_.vocab; at += kLanes) store(scores + at, finished(load(scores + at), divisor, cap));
  for (; at < sizes_.vocab; ++at) scores[at] = finished(splat(scores[at]), divisor, cap)[0];
}

}  // namespace catenary
