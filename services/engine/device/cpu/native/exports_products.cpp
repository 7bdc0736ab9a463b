// Packing for Python, and whole linear layers for tests and measurements.
#include <new>
#include <vector>

#include "linear.h"

using catenary::Prefetch;
using catenary::Hand;
using catenary::Linear;
using catenary::Operand;
using catenary::Result;
using catenary::Team;
using catenary::WeightKind;

namespace {

// Layers that are computed one after another, each with the same rows and a result of its own.
struct LayersRun {
  const Linear* layers;
  const Operand* operands;
  const Result* results;
  int64_t count;
  const float* x;
  int64_t stride;
  int64_t rows;
  // Of each thread, if it is known which panels it will read.
  std::vector<Prefetch> ahead;
};

void foresee_layers(LayersRun& run, int threads) {
  std::vector<Prefetch> ahead(static_cast<size_t>(threads));
  for (int rank = 0; rank < threads; ++rank) {
    for (int64_t index = 0; index < run.count; ++index) {
      Prefetch& own = ahead[static_cast<size_t>(rank)];
      if (!catenary::foresee(run.layers[index], run.rows, rank, threads, own)) return;
    }
  }
  run.ahead = std::move(ahead);
}

void run_layers(Team& team, LayersRun& run) {
  const catenary::Foresight foresight(team, run.ahead.empty() ? nullptr : run.ahead.data());
  for (int64_t index = 0; index < run.count; ++index) {
    const Linear& layer = run.layers[index];
    const Operand& operand = run.operands[index];
    team.share_runs(run.rows, [&](int64_t row, const Hand&) {
      catenary::put_row(layer.kind, run.x + row * run.stride, layer.inputs, operand, row);
    });
    catenary::share_product(team, layer, operand, run.rows, index, [&](int) { return run.results[index]; });
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Outputs with those that fill up the last panels.
int64_t catenary_padded_outputs(int32_t outputs, int32_t gated) {
  return catenary::panels_of(outputs, gated) * catenary::kPanel;
}

int64_t catenary_packed_bytes(int32_t kind, int32_t outputs, int32_t inputs, int32_t gated) {
  return catenary::packed_bytes(static_cast<WeightKind>(kind), outputs, inputs, gated);
}

void catenary_pack(
    int32_t kind, const float* weight, const float* ups, int32_t outputs, int32_t inputs, void* panels,
    float* scales, int32_t* sums) {
  catenary::pack(static_cast<WeightKind>(kind), weight, ups, outputs, inputs, panels, scales, sums);
}

void catenary_pack_bias(const float* bias, const float* ups, int32_t outputs, float* packed) {
  catenary::pack_bias(bias, ups, outputs, packed);
}

int64_t catenary_operand_stride(int32_t kind, int32_t inputs) {
  return catenary::operand_stride(static_cast<WeightKind>(kind), inputs);
}

// x: float32 [rows], `stride` floats from row to row. Every layer has an operand and a result.
void catenary_run_layers(
    Team* team, const Linear* layers, const Operand* operands, const Result* results, int64_t count,
    const float* x, int64_t stride, int64_t rows) {
  LayersRun run = {layers, operands, results, count, x, stride, rows, {}};
  try {
    foresee_layers(run, team->size());
  } catch (const std::bad_alloc&) {
    // They know as much as they need.
  }
  run_layers(*team, run);
}

}  // extern "C"
#pragma GCC visibility pop
