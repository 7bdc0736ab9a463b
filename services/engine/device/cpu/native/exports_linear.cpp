// One linear layer by itself, between operations that others compute: for models whose layers torch runs.
#include "linear.h"
#include "rows.h"

using catenary::Activation;
using catenary::CacheKind;
using catenary::Linear;
using catenary::Operand;
using catenary::Result;
using catenary::Team;
using catenary::Worker;

namespace {

struct LinearRun {
  const Linear& linear;
  const Operand& operand;
  const Result& result;
  CacheKind kind;
  const void* x;
  int64_t rows;
  float* scratch;
  int64_t scratch_stride;
};

void run_linear(void* context, Worker& worker) {
  const LinearRun& run = *static_cast<LinearRun*>(context);
  float* row = run.scratch + worker.rank() * run.scratch_stride;
  worker.share_runs(run.rows, [&](int64_t index, bool) {
    catenary::read_row(run.kind, run.x, index, run.linear.inputs, 1.0f, row);
    catenary::put_made(run.linear, row, row, run.operand, index);
  });
  catenary::share_product(worker, run.linear, run.operand, run.rows, run.result);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// x: [rows, inputs] of this kind, dense. out: float32 [rows, outputs]. The operand has room for the rows, `scratch` for
// a row of floats of each thread, `scratch_stride` floats apart. Of a layer that is not gated.
void catenary_run_linear(
    Team* team, const Linear* linear, const Operand* operand, int32_t kind, const void* x, int64_t rows, float* scratch,
    int64_t scratch_stride, float* out) {
  const Result result = {Result::Way::kStore, Activation::kNone, 1.0f, out, linear->outputs};
  LinearRun run = {*linear, *operand, result, static_cast<CacheKind>(kind), x, rows, scratch, scratch_stride};
  team->run(run_linear, &run);
}

}  // extern "C"
#pragma GCC visibility pop
