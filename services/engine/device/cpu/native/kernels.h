// What the kernels give one another, and how everything lies in memory.
//
// A function without a Team does its part of the work in the calling thread; the caller divides the work (by
// panels, rows, heads) among a team's threads. Sums are in float32 everywhere.
#pragma once

#include <cstdint>

#include "activation.h"
#include "prefetch.h"
#include "simd.h"
#include "team.h"

namespace catenary {

// ---- Linear layers (products.cpp, packing.cpp) -----------------------------------------------------------

enum class WeightKind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

// Outputs that one panel computes: two vectors of accumulators beside one another.
constexpr int kPanel = 2 * kLanes;

// A weight [outputs, inputs], packed once in panels of kPanel outputs; outputs beyond the last are zero. In a
// panel:
//   float32   [inputs][kPanel]
//   bfloat16  [inputs / 2][kPanel][2], inputs padded with zero to an even number
//   int8      [inputs / 4][kPanel][4], inputs padded to a multiple of 4; weight = int8 * scales[output]
//   int4      groups of kGroup inputs, each with a scale and an offset for each output; see packing.cpp
// A gated layer (gate and up in one product) has panels of gates and ups in turn: gates of outputs [0,
// kPanel), their ups, and so on; so the last panel of each may be filled up with zeros. Outputs "padded to
// panels" below are kPanel times as many as this.
inline int64_t panels_of(int32_t outputs, int32_t gated) {
  const int64_t each = gated ? outputs / 2 : outputs;
  return (each + kPanel - 1) / kPanel * (gated ? 2 : 1);
}

struct Linear {
  WeightKind kind;
  int32_t outputs;
  int32_t inputs;
  // 1 if the outputs are gates and ups, `outputs` counting both.
  int32_t gated;
  const void* panels;
  // int8: float32 [outputs padded to panels]. int4: in the panels.
  const float* scales;
  // int8: sum of each output's int8 weights, int32 [outputs padded to panels]: what unsigned activations are
  // shifted by comes off again with it.
  const int32_t* sums;
  // float32 [outputs padded to panels], in the order of the panels, or null.
  const float* bias;

  int64_t panel_count() const { return panels_of(outputs, gated); }
};

// Inputs that share a scale and an offset in an int4 weight.
constexpr int kGroup = 32;

// The layer that gives outputs [begin, end) alone, of one that is not gated. begin: a multiple of kPanel.
Linear part_of(const Linear& linear, int32_t begin, int32_t end);

// The rows that a linear layer multiplies, as its kind of weight wants them. `stride`: bytes from row to row,
// a multiple of 64, rows padded with what multiplies to nothing.
//   float32 weights: float32. bfloat16: Bf16. int8: bytes, x = (byte - 128) * scales[row]. int4: groups of
//   kGroup Bf16, each with the float of its sum behind it.
struct Operand {
  void* data;
  int64_t stride;
  // int8: float32 [rows].
  float* scales;
};

// Bytes of one operand row.
int64_t operand_stride(WeightKind kind, int32_t inputs);

// Writes one row of `inputs` floats as row `row` of the operand. int8: with the row's own scale, so that no
// row depends on its neighbours.
void put_row(WeightKind kind, const float* x, int32_t inputs, const Operand& operand, int64_t row);

// What becomes of the products. `out` float32 [rows, width], `stride` floats from row to row.
//   kStore  out = product + bias
//   kAdd    out += factor * (product + bias): the residual stream
//   kGate   out [rows, outputs / 2] = activation(gate + bias) * (up + bias): of gated layers alone
//   kBest   out [rows] is the best of all products yet, in kBestBytes each: of each lane the first of the
//           largest, as floats, its output as int32, and as int32 whether there was one that is no number.
//           For a single thread
struct Result {
  enum class Way : int32_t { kStore = 0, kAdd = 1, kGate = 2, kBest = 3 };
  Way way;
  Activation activation;
  float factor;
  float* out;
  int64_t stride;
};

constexpr int64_t kBestBytes = 3 * kBytes;

// How a product is divided among threads: pieces [0, count), which may be computed in any order and thread.
// Few rows: each piece is some panels for all rows, so that a weight is read from memory once. Many rows:
// tiles.
struct Pieces {
  int64_t count;
  int32_t panels_each;
  int32_t rows_each;
  // Many rows: pieces go through so many blocks of rows for some panels before they come to the next panels.
  int32_t blocks_each;
};
Pieces divide(const Linear& linear, int64_t rows, int threads);

// One piece of operand [rows] times the weight. ahead: what the calling thread foresees, if the piece is one
// of its own in that; else null.
void multiply(
    const Linear& linear, const Operand& operand, int64_t rows, const Pieces& pieces, int64_t piece,
    const Result& result, Prefetch* ahead);

// Bytes of `panels`, a multiple of 64, as `panels` is to be aligned.
int64_t packed_bytes(WeightKind kind, int32_t outputs, int32_t inputs, int32_t gated);

// Packs a weight, float32 row-major [outputs, inputs]; of a gated layer `weight` are the gates and `ups` the
// ups, each [outputs / 2, inputs], else `ups` is null. scales and sums [outputs padded to panels] are written
// for int8 alone. Quantized: int8 symmetric, per output; int4 by scale and offset, per output and group of
// inputs. A weight may be packed in parts, each of a multiple of kPanel rows (but the last): a part begins
// packed_bytes() of the rows before it further on.
void pack(
    WeightKind kind, const float* weight, const float* ups, int32_t outputs, int32_t inputs, void* panels,
    float* scales, int32_t* sums);

// A row of a weight that is neither quantized nor gated, times the factor: float32 [inputs].
void unpack_row(const Linear& linear, int64_t output, float factor, float* row);

// Packs a bias [outputs] likewise, as Linear has it.
void pack_bias(const float* bias, const float* ups, int32_t outputs, float* packed);

// ---- Element by element (elements.cpp) -------------------------------------------------------------------

// out = x / sqrt(mean(x^2) + eps) * weight, float32 [size] each; out may be x. A weight of one plus the
// checkpoint's is made so beforehand.
void rms_norm(const float* x, const float* weight, int32_t size, float eps, float* out);

// Rotates the first `rotated` of a head's dimensions, halves paired: cosines and sines float32 [rotated / 2].
void rotate(float* head, const float* cosines, const float* sines, int32_t rotated);

// ---- Attention over paged KV (attention_*.cpp) -----------------------------------------------------------

enum class CacheKind : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// One layer's cache: key and value [slots, kv_heads, head_dim]. Slots of one block lie together.
struct Cache {
  CacheKind kind;
  int32_t block_size;
  int32_t kv_heads;
  int32_t head_dim;
  void* key;
  void* value;
};

// A sequence's tokens in a forward: rows [first, first + tokens) of the batch, at positions context, context
// + 1, ... `blocks`: ids of the blocks of positions 0 to context + tokens, in order; where all layers have a
// window, those before it may be anything. Keys and values are in the cache already, those of the forward's
// own tokens included.
struct Span {
  int64_t first;
  int32_t tokens;
  int32_t context;
  const int32_t* blocks;
};

struct AttentionShape {
  int32_t heads;
  // More than 0.
  float scale;
  // How many positions a token looks back, itself included; 0: all.
  int32_t window;
  // Scores become cap * tanh(score / cap); 0: they stay.
  float softcap;
};

// Writes a token's keys and values [kv_heads, head_dim] at its slot.
void write_kv(const Cache& cache, int64_t slot, const float* key, const float* value);

// Head dimensions are multiples of 8 up to 256, heads a multiple of kv heads, block sizes any.
bool attention_supported(const Cache& cache, int32_t heads);

// The attention of all spans, divided into pieces, the largest first. A plan is made once a forward (its
// spans are the same in all layers) and reads the spans' blocks as long as it lives; null where there is no
// memory for it.
//
// What comes out for a token depends on its own query and on the keys and values that it sees, bit by bit:
// not on the batch around it, nor on how its tokens came in spans, nor on the number of threads, nor on what
// lies in other slots.
struct AttentionPlan;
AttentionPlan* plan_attention(
    const Span* spans, int64_t count, const Cache& cache, int32_t heads, int threads);
void free_plan(AttentionPlan* plan);
int64_t attention_pieces(const AttentionPlan& plan);
int64_t attention_scratch(const AttentionPlan& plan);

// One piece, in any order and thread; but a layer's pieces must all be done before those of the next one
// begin. query float32 [rows, query_stride], a token's heads [heads, head_dim] at its start; out float32
// [rows, heads * head_dim]. `scratch`: attention_scratch() bytes of the calling thread, 64-byte aligned. A
// bfloat16 cache is multiplied with queries and weights rounded to bfloat16 where the CPU has such products,
// else with both as they are.
void attend(
    const AttentionPlan& plan, int64_t piece, const AttentionShape& shape, const Cache& cache,
    const float* query, int64_t query_stride, float* out, void* scratch);

}  // namespace catenary
