#include "head.h"

#include <limits>

#include "rows.h"

namespace catenary {

namespace {

F32 finished(F32 scores, float divisor, float cap) {
  scores = scores / divisor;
  return cap > 0 ? cap * tanh(scores / cap) : scores;
}

}  // namespace

HeadPass::HeadPass(Decoder& decoder, const void* hidden, int64_t rows, int64_t* tokens, float* scores)
    : decoder_(decoder),
      sizes_(decoder.architecture_),
      hidden_(hidden),
      rows_(rows),
      tokens_(tokens),
      scores_(scores) {}

void HeadPass::run() {
  Team& team = decoder_.team_;
  // Behind the layers, if the forward before had as many rows.
  const Foresight foresight(team, decoder_.foreseen_ == rows_ ? decoder_.aheads() : nullptr);
  const int64_t nth = Decoder::kProducts * int64_t{sizes_.layer_count};
  const auto widened = [&](int64_t row, float* scratch) {
    read_row(sizes_.kind, hidden_, row, sizes_.hidden, 1.0f, scratch);
    return scratch;
  };
  const Operand operand =
      make_operand(team, sizes_.head, rows_, decoder_.shared_operand(), decoder_.own_, widened);
  if (tokens_ != nullptr) {
    find_best(operand, nth);
    return;
  }
  const Result result{Result::Way::kStore, Activation::kNone, 1.0f, scores_, sizes_.vocab};
  share_product(team, sizes_.head, operand, rows_, nth, [&](int) { return result; });
  if (sizes_.logits_divisor != 1.0f || sizes_.logits_softcap > 0) {
    team.share(rows_, [this](int64_t row, const Hand&) { finish(row); });
  }
}

void HeadPass::find_best(const Operand& operand, int64_t nth) {
  // Also for threads that will not come: those who choose look at all.
  for (Own& own : decoder_.own_) {
    float* best = own.best.floats(0);
    for (int64_t i = 0; i < rows_ * kBestBytes / 4; ++i) {
      best[i] = i % (3 * kLanes) < kLanes ? -std::numeric_limits<float>::infinity() : 0.0f;
    }
  }
  share_product(decoder_.team_, sizes_.head, operand, rows_, nth, [this](int rank) {
    float* best = decoder_.own_[static_cast<size_t>(rank)].best.floats(0);
    return Result{Result::Way::kBest, Activation::kNone, 1.0f, best, kBestBytes / 4};
  });
  decoder_.team_.share(rows_, [this](int64_t row, const Hand&) { choose(row); });
}

// The best of what threads and lanes have kept.
void HeadPass::choose(int64_t row) {
  float score = -std::numeric_limits<float>::infinity();
  int32_t token = 0, strange = 0;
  for (Own& own : decoder_.own_) {
    const float* kept = own.best.floats(0) + row * kBestBytes / 4;
    const F32 values = load(kept);
    const I32 outputs = load_as<I32>(kept + kLanes), none = load_as<I32>(kept + 2 * kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      strange |= none[lane];
      if (values[lane] > score || (values[lane] == score && outputs[lane] < token)) {
        score = values[lane];
        token = outputs[lane];
      }
    }
  }
  tokens_[row] = token;
  scores_[row] = strange != 0 ? std::numeric_limits<float>::quiet_NaN() : score;
}

void HeadPass::finish(int64_t row) {
  float* scores = scores_ + row * sizes_.vocab;
  const float divisor = sizes_.logits_divisor, cap = sizes_.logits_softcap;
  int64_t at = 0;
  for (; at + kLanes <= sizes_.vocab; at += kLanes) {
    store(scores + at, finished(load(scores + at), divisor, cap));
  }
  for (; at < sizes_.vocab; ++at) scores[at] = finished(splat(scores[at]), divisor, cap)[0];
}

}  // namespace catenary
