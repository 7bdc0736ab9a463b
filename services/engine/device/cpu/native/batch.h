// A forward's tokens without its padding, and whose they are.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace catenary {

// Why a batch cannot be computed. The numbers are part of the C interface.
enum class Fault : int32_t {
  kNone = 0,
  kToken = 1,
  kPosition = 2,
  kSlot = 3,
  kBlock = 4,
  kMemory = 5,
  kPlace = 6
};

// The caches: blocks of sequences; slots from `padding_start` on take the writes of padding.
struct Paging {
  int64_t block_size;
  int64_t blocks;
  int64_t padding_start;
};

// A prefill's arguments: see PagedModel.prefill. Rows of `query` tokens after `context` blocks each.
struct PrefillArguments {
  int64_t rows;
  int64_t query;
  int64_t context;
  const int64_t* tokens;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* context_blocks;
  const int64_t* context_lens;
};

// A decode's arguments: see PagedModel.decode. `blocks` null: entry e is block e.
struct DecodeArguments {
  int64_t rows;
  int64_t entries;
  const int64_t* tokens;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* blocks;
  const int64_t* owners;
  const int64_t* starts;
};

// The rows that are computed, in the order of the arguments, each with its place among them. Spans point into
// `blocks`: a batch is not copied.
struct Batch {
  std::vector<int64_t> tokens;
  std::vector<int64_t> positions;
  std::vector<int64_t> slots;
  std::vector<int64_t> places;
  std::vector<Span> spans;
  std::vector<int32_t> blocks;
  // Rows that go through all of the last layer, and each of them as a span of its own: see `select`.
  std::vector<int64_t> selected;
  std::vector<Span> selected_spans;

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }

  // Both check all that is used as an index later.
  Fault read(const PrefillArguments& arguments, const Paging& paging, int64_t vocab);
  Fault read(const DecodeArguments& arguments, const Paging& paging, int64_t vocab);

  // Selects the rows of a prefill that was read by their places among its tokens.
  Fault select(const int64_t* places_of, int64_t count);

 private:
  void clear();
  Fault add(
      int64_t token, int64_t position, int64_t slot, int64_t place, const Paging& paging, int64_t vocab);
  Fault read_row(const PrefillArguments& arguments, int64_t row, const Paging& paging, int64_t vocab);
  void point();

  // Where each span's blocks begin.
  std::vector<int64_t> offsets_;
  // The span of each decoding row, -1 for padding.
  std::vector<int64_t> span_of_row_;
};

}  // namespace catenary
