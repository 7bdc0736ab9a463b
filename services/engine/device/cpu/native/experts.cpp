#include "experts.h"

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace catenary {

namespace {

// Rows that are computed at once: enough to read few weights for each, few enough to need little memory.
constexpr int64_t kMostRows = 1024;

Operand operand_of(const Linear& linear, Buffer& rows, Buffer& scales, int64_t first = 0) {
  const int64_t stride = operand_stride(linear.kind, linear.inputs);
  return {static_cast<uint8_t*>(rows.reserve(0)) + first * stride, stride, scales.floats(0) + first};
}

int64_t operand_bytes(const Linear& linear, int64_t rows) {
  return rows * operand_stride(linear.kind, linear.inputs);
}

}  // namespace

void Mixture::make_room(const Experts& experts, int64_t rows) {
  rows = std::min(rows, kMostRows);
  const int64_t sorted = rows * experts.per_token;
  const Linear &up = experts.gate_up[0], &down = experts.down[0];
  scores_.floats(rows * aligned_floats(experts.count));
  routed_.reserve(operand_bytes(experts.router, rows));
  normed_.reserve(operand_bytes(up, rows));
  normed_scales_.floats(rows);
  sorted_.reserve(operand_bytes(up, sorted));
  sorted_scales_.floats(sorted);
  inner_.floats(sorted * aligned_floats(down.inputs));
  closing_.reserve(operand_bytes(down, sorted));
  closing_scales_.floats(sorted);
  outs_.floats(sorted * aligned_floats(down.outputs));
  const auto grow = [](auto& values, int64_t count) {
    if (static_cast<int64_t>(values.size()) < count) values.resize(static_cast<size_t>(count));
  };
  grow(chosen_, sorted);
  grow(weights_, sorted);
  grow(places_, sorted);
  grow(sources_, sorted);
  grow(starts_, experts.count + 1);
  active_.reserve(static_cast<size_t>(experts.count));
}

void Mixture::compute(Team& team, std::vector<Own>& owns, const MixtureCall& call, int64_t rows) {
  for (int64_t first = 0; first < rows; first += kMostRows) {
    MixtureCall part = call;
    part.residual += first * call.stride;
    compute_part(team, owns, part, std::min(kMostRows, rows - first));
  }
}

void Mixture::compute_part(Team& team, std::vector<Own>& owns, const MixtureCall& call, int64_t rows) {
  const Experts& experts = *call.experts;
  const Linear &router = experts.router, &up = experts.gate_up[0], &down = experts.down[0];
  const int64_t sorted_rows = rows * experts.per_token;
  const int64_t inner_stride = aligned_floats(down.inputs), out_stride = aligned_floats(down.outputs);
  const auto scratch_of = [&](const Hand& hand) {
    return owns[static_cast<size_t>(hand.rank)].row.floats(0);
  };
  const Operand routed = operand_of(router, routed_, normed_scales_);
  const Operand normed = operand_of(up, normed_, normed_scales_);
  team.share(rows, [&](int64_t row, const Hand& hand) {
    float* scratch = scratch_of(hand);
    rms_norm(call.residual + row * call.stride, call.norm, router.inputs, call.eps, scratch);
    put_row(router.kind, scratch, router.inputs, routed, row);
    put_made(up, scratch, scratch, normed, row);
  });
  const int64_t scores_stride = aligned_floats(experts.count);
  const Result scores{Result::Way::kStore, Activation::kNone, 1.0f, scores_.floats(0), scores_stride};
  // Which experts will be read nobody foresees.
  share_product(team, router, routed, rows, 0, [&](int) { return scores; });
  team.share(rows, [&](int64_t row, const Hand&) { choose(experts, row); });
  sort(experts, rows, team.size());

  const Operand sorted = operand_of(up, sorted_, sorted_scales_);
  team.share(sorted_rows, [&](int64_t row, const Hand&) {
    const int64_t source = sources_[static_cast<size_t>(row)];
    std::memcpy(
        static_cast<uint8_t*>(sorted.data) + row * sorted.stride,
        static_cast<const uint8_t*>(normed.data) + source * normed.stride,
        static_cast<size_t>(normed.stride));
    sorted.scales[row] = normed.scales[source];
  });
  const auto expert_of = [&](int64_t piece, int64_t Active::*first) -> const Active& {
    const auto later = [first](int64_t wanted, const Active& active) { return wanted < active.*first; };
    return *(std::upper_bound(active_.begin(), active_.end(), piece, later) - 1);
  };
  team.share(up_pieces_, [&](int64_t piece, const Hand&) {
    const Active& active = expert_of(piece, &Active::first_up);
    float* inner = inner_.floats(0) + active.start * inner_stride;
    const Result gated{Result::Way::kGate, call.activation, 1.0f, inner, inner_stride};
    const Operand rows_of = operand_of(up, sorted_, sorted_scales_, active.start);
    const int64_t own = piece - active.first_up;
    multiply(experts.gate_up[active.expert], rows_of, active.rows, active.up, own, gated, nullptr);
  });
  const Operand closing = operand_of(down, closing_, closing_scales_);
  team.share(sorted_rows, [&](int64_t row, const Hand& hand) {
    put_made(down, inner_.floats(0) + row * inner_stride, scratch_of(hand), closing, row);
  });
  team.share(down_pieces_, [&](int64_t piece, const Hand&) {
    const Active& active = expert_of(piece, &Active::first_down);
    float* outs = outs_.floats(0) + active.start * out_stride;
    const Result out{Result::Way::kStore, Activation::kNone, 1.0f, outs, out_stride};
    const Operand rows_of = operand_of(down, closing_, closing_scales_, active.start);
    const int64_t own = piece - active.first_down;
    multiply(experts.down[active.expert], rows_of, active.rows, active.down, own, out, nullptr);
  });
  team.share(rows, [&](int64_t row, const Hand& hand) { add_up(call, row, scratch_of(hand)); });
}

// Softmax over all scores, and the likeliest experts of it, the first one of equals. Scores that are no
// numbers choose some experts all the same, with weights that are none.
void Mixture::choose(const Experts& experts, int64_t row) {
  float* scores = scores_.floats(0) + row * aligned_floats(experts.count);
  const float most = *std::max_element(scores, scores + experts.count);
  float total = 0;
  for (int32_t expert = 0; expert < experts.count; ++expert) {
    total += scores[expert] = std::exp(scores[expert] - most);
  }
  float* weights = weights_.data() + row * experts.per_token;
  int32_t* chosen = chosen_.data() + row * experts.per_token;
  float kept = 0;
  for (int32_t index = 0; index < experts.per_token; ++index) {
    const int32_t best = static_cast<int32_t>(std::max_element(scores, scores + experts.count) - scores);
    chosen[index] = best;
    weights[index] = scores[best] / total;
    kept += weights[index];
    // Below all that are left. Scores that are no numbers choose the first again and again, and the result is
    // none.
    scores[best] = -1;
  }
  for (int32_t index = 0; index < experts.per_token; ++index) {
    if (experts.normalize) weights[index] /= kept;
    if (experts.rounded) {
      Bf16 rounded;
      from_float(weights[index], &rounded);
      weights[index] = to_float(rounded);
    }
  }
}

// Sorts the chosen experts of all rows, rows of the same expert in their order, and divides the products.
void Mixture::sort(const Experts& experts, int64_t rows, int threads) {
  const int64_t count = rows * experts.per_token;
  std::fill(starts_.begin(), starts_.begin() + experts.count + 1, 0);
  for (int64_t index = 0; index < count; ++index) {
    ++starts_[static_cast<size_t>(chosen_[static_cast<size_t>(index)]) + 1];
  }
  active_.clear();
  up_pieces_ = down_pieces_ = 0;
  for (int32_t expert = 0; expert < experts.count; ++expert) {
    const size_t at = static_cast<size_t>(expert);
    const int64_t start = starts_[at], chosen = starts_[at + 1];
    starts_[at + 1] += start;
    if (chosen == 0) continue;
    const Pieces up = divide(experts.gate_up[expert], chosen, threads);
    const Pieces down = divide(experts.down[expert], chosen, threads);
    active_.push_back({expert, start, chosen, up, down, up_pieces_, down_pieces_});
    up_pieces_ += up.count;
    down_pieces_ += down.count;
  }
  for (int64_t index = 0; index < count; ++index) {
    const size_t at = static_cast<size_t>(index);
    const int64_t place = starts_[static_cast<size_t>(chosen_[at])]++;
    places_[at] = place;
    sources_[static_cast<size_t>(place)] = index / experts.per_token;
  }
}

void Mixture::add_up(const MixtureCall& call, int64_t row, float* scratch) {
  const Experts& experts = *call.experts;
  const int64_t hidden = experts.down[0].outputs, stride = aligned_floats(hidden);
  std::fill(scratch, scratch + hidden, 0.0f);
  for (int64_t index = row * experts.per_token; index < (row + 1) * experts.per_token; ++index) {
    const size_t at = static_cast<size_t>(index);
    add_row(outs_.floats(0) + places_[at] * stride, hidden, weights_[at], scratch);
  }
  if (call.post_norm != nullptr) {
    rms_norm(scratch, call.post_norm, static_cast<int32_t>(hidden), call.eps, scratch);
  }
  add_row(scratch, hidden, call.factor, call.residual + row * call.stride);
}

int64_t Mixture::bytes() const {
  int64_t total = 0;
  for (const Buffer* buffer :
       {&scores_, &routed_, &normed_, &normed_scales_, &sorted_, &sorted_scales_, &inner_, &closing_,
        &closing_scales_, &outs_}) {
    total += buffer->size();
  }
  return total;
}

}  // namespace catenary
