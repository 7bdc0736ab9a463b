#include "batch.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace catenary {

namespace {

constexpr int64_t kMostPositions = std::numeric_limits<int32_t>::max();

}  // namespace

void Batch::clear() {
  tokens.clear();
  positions.clear();
  slots.clear();
  places.clear();
  spans.clear();
  blocks.clear();
  offsets_.clear();
}

Fault Batch::add(
    int64_t token, int64_t position, int64_t slot, int64_t place, const Paging& paging, int64_t vocab) {
  if (token < 0 || token >= vocab) return Fault::kToken;
  if (position < 0 || position >= kMostPositions) return Fault::kPosition;
  // A block's tokens lie in it in order: attention reads them so.
  if (slot < 0 || slot % paging.block_size != position % paging.block_size) return Fault::kSlot;
  tokens.push_back(token);
  positions.push_back(position);
  slots.push_back(slot);
  places.push_back(place);
  return Fault::kNone;
}

void Batch::point() {
  for (size_t index = 0; index < spans.size(); ++index) spans[index].blocks = blocks.data() + offsets_[index];
}

Fault Batch::read(const PrefillArguments& arguments, const Paging& paging, int64_t vocab) {
  clear();
  for (int64_t row = 0; row < arguments.rows; ++row) {
    const Fault fault = read_row(arguments, row, paging, vocab);
    if (fault != Fault::kNone) return fault;
  }
  point();
  return Fault::kNone;
}

Fault Batch::select(const int64_t* places_of, int64_t count) {
  selected.clear();
  selected_spans.clear();
  for (int64_t index = 0; index < count; ++index) {
    const auto place = std::lower_bound(places.begin(), places.end(), places_of[index]);
    if (place == places.end() || *place != places_of[index]) return Fault::kPlace;
    const int64_t row = place - places.begin();
    const auto later = [](int64_t wanted, const Span& span) { return wanted < span.first; };
    const Span& span = *(std::upper_bound(spans.begin(), spans.end(), row, later) - 1);
    const int32_t position = static_cast<int32_t>(positions[static_cast<size_t>(row)]);
    selected.push_back(row);
    selected_spans.push_back({index, 1, position, span.blocks});
  }
  return Fault::kNone;
}

Fault Batch::read_row(const PrefillArguments& arguments, int64_t row, const Paging& paging, int64_t vocab) {
  const int64_t start = row * arguments.query, size = paging.block_size;
  const int64_t* slot = arguments.slots + start;
  int64_t count = 0;
  while (count < arguments.query && slot[count] < paging.padding_start) ++count;
  for (int64_t index = count; index < arguments.query; ++index) {
    if (slot[index] < paging.padding_start) return Fault::kSlot;
  }
  if (count == 0) return Fault::kNone;
  const int64_t context = arguments.context_lens[row], cached = (context + size - 1) / size;
  if (context < 0 || cached > arguments.context) return Fault::kPosition;
  offsets_.push_back(static_cast<int64_t>(blocks.size()));
  for (int64_t index = 0; index < cached; ++index) {
    const int64_t block = arguments.context_blocks[row * arguments.context + index];
    if (block < 0 || block >= paging.blocks) return Fault::kBlock;
    blocks.push_back(static_cast<int32_t>(block));
  }
  spans.push_back({rows(), static_cast<int32_t>(count), static_cast<int32_t>(context), nullptr});
  for (int64_t index = 0; index < count; ++index) {
    const int64_t flat = start + index, position = arguments.positions[flat];
    if (position != context + index) return Fault::kPosition;
    const Fault fault = add(arguments.tokens[flat], position, slot[index], flat, paging, vocab);
    if (fault != Fault::kNone) return fault;
    const int64_t block = slot[index] / size;
    // Its first tokens may go on in the last block of the context.
    if (position / size >= static_cast<int64_t>(blocks.size()) - offsets_.back()) {
      blocks.push_back(static_cast<int32_t>(block));
    } else if (blocks.back() != block) {
      return Fault::kSlot;
    }
  }
  return Fault::kNone;
}

Fault Batch::read(const DecodeArguments& arguments, const Paging& paging, int64_t vocab) {
  clear();
  span_of_row_.assign(static_cast<size_t>(arguments.rows), -1);
  int64_t total = 0;
  for (int64_t row = 0; row < arguments.rows; ++row) {
    const int64_t slot = arguments.slots[row], position = arguments.positions[row];
    if (slot >= paging.padding_start) continue;
    const Fault fault = add(arguments.tokens[row], position, slot, row, paging, vocab);
    if (fault != Fault::kNone) return fault;
    span_of_row_[static_cast<size_t>(row)] = static_cast<int64_t>(spans.size());
    spans.push_back({rows() - 1, 1, static_cast<int32_t>(position), nullptr});
    offsets_.push_back(total);
    total += position / paging.block_size + 1;
    // Every block of a row is an entry, so a position cannot ask for more memory than the arguments take.
    if (total > arguments.entries) return Fault::kBlock;
  }
  blocks.assign(static_cast<size_t>(total), -1);
  for (int64_t entry = 0; entry < arguments.entries; ++entry) {
    const int64_t owner = arguments.owners[entry];
    if (owner < 0 || owner >= arguments.rows) continue;
    const int64_t index = span_of_row_[static_cast<size_t>(owner)];
    if (index < 0) continue;
    const int64_t block = arguments.blocks == nullptr ? entry : arguments.blocks[entry];
    const int64_t nth = arguments.starts[entry] / paging.block_size;
    if (block < 0 || block >= paging.blocks) return Fault::kBlock;
    if (nth < 0 || nth > arguments.positions[owner] / paging.block_size) return Fault::kBlock;
    blocks[static_cast<size_t>(offsets_[static_cast<size_t>(index)] + nth)] = static_cast<int32_t>(block);
  }
  for (const int32_t block : blocks) {
    if (block < 0) return Fault::kBlock;
  }
  point();
  return Fault::kNone;
}

}  // namespace catenary
