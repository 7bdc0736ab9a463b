// The C interface of decoders. A handle is given to one caller at a time.
#include <new>

#include "decoder.h"
#include "team.h"

using namespace catenary;

namespace {

// No exception leaves the library: what throws has no memory.
template <typename Work>
int32_t guarded(Work&& work) {
  try {
    return static_cast<int32_t>(work());
  } catch (const std::bad_alloc&) {
    return static_cast<int32_t>(Fault::kMemory);
  }
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// The team stays the caller's, and lives longer. Null if there is no memory.
void* catenary_decoder_new(const Architecture* architecture, void* team) {
  try {
    return new Decoder(*architecture, *static_cast<Team*>(team));
  } catch (...) {
    return nullptr;
  }
}

void catenary_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

int32_t catenary_decoder_attach(void* decoder, const Pages* pages, int64_t block_size, int64_t blocks) {
  return guarded([&] {
    static_cast<Decoder*>(decoder)->attach(pages, block_size, blocks);
    return Fault::kNone;
  });
}

int32_t catenary_decoder_clear(void* decoder, const int64_t* blocks, int64_t count) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->clear(blocks, count); });
}

int32_t catenary_decoder_prefill(void* decoder, const PrefillArguments* arguments, void* hidden) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->prefill(*arguments, hidden); });
}

int32_t catenary_decoder_select(
    void* decoder, const PrefillArguments* arguments, const int64_t* places, int64_t count, void* hidden,
    uint8_t* sound) {
  return guarded([&] {
    return static_cast<Decoder*>(decoder)->select(*arguments, places, count, hidden, sound);
  });
}

int32_t catenary_decoder_decode(void* decoder, const DecodeArguments* arguments, void* hidden) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->decode(*arguments, hidden); });
}

int32_t catenary_decoder_logits(void* decoder, const void* hidden, int64_t rows, float* scores) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->logits(hidden, rows, scores); });
}

// Of models that neither divide their scores nor cap them.
int32_t catenary_decoder_choose(
    void* decoder, const void* hidden, int64_t rows, int64_t* tokens, float* scores) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->choose(hidden, rows, tokens, scores); });
}

int32_t catenary_decoder_decode_best(
    void* decoder, const DecodeArguments* arguments, const Following* following, void* hidden) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->decode_best(*arguments, *following, hidden); });
}

// Bytes that forwards keep for the next one.
int64_t catenary_decoder_scratch(const void* decoder) {
  return static_cast<const Decoder*>(decoder)->scratch_bytes();
}

}  // extern "C"

#pragma GCC visibility pop
