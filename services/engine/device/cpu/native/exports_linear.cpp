// One linear layer by itself, between operations that others compute: for models whose layers torch runs.
#include "linear.h"
#include "rows.h"

using catenary::Activation;
using catenary::CacheKind;
using catenary::Hand;
using catenary::Linear;
using catenary::Operand;
using catenary::Result;
using catenary::Team;

#pragma GCC visibility push(default)
extern "C" {

// x: [rows, inputs] of this kind, dense. out: float32 [rows, outputs]. The operand has room for the rows,
// `scratch` for a row of floats of each thread, `scratch_stride` floats apart. Of a layer that is not gated.
void catenary_run_linear(
    Team* team, const Linear* linear, const Operand* operand, int32_t kind, const void* x, int64_t rows,
    float* scratch, int64_t scratch_stride, float* out) {
  team->share_runs(rows, [&](int64_t index, const Hand& hand) {
    float* row = scratch + hand.rank * scratch_stride;
    catenary::read_row(static_cast<CacheKind>(kind), x, index, linear->inputs, 1.0f, row);
    catenary::put_made(*linear, row, row, *operand, index);
  });
  const Result result = {Result::Way::kStore, Activation::kNone, 1.0f, out, linear->outputs};
  catenary::share_product(*team, *linear, *operand, rows, 0, [&](int) { return result; });
}

}  // extern "C"
#pragma GCC visibility pop
