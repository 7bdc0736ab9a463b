// Attention and what is done element by element, for tests and measurements through the C interface.
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace catenary {

namespace {

// All layers of a forward, one after another.
struct Layers {
  const AttentionPlan* plan;
  AttentionShape shape;
  Cache first;
  int64_t count;
  // Bytes from one layer's keys (and values) to the next one's, and floats from output to output.
  int64_t cache_stride;
  int64_t out_stride;
  const float* query;
  int64_t query_stride;
  float* out;
  // Of each thread.
  std::vector<char*> scratch;
};

void attend_layers(Team& team, const Layers& layers) {
  Cache cache = layers.first;
  for (int64_t layer = 0; layer < layers.count; ++layer) {
    team.share(attention_pieces(*layers.plan), [&](int64_t piece, const Hand& hand) {
      attend(*layers.plan, piece, layers.shape, cache, layers.query, layers.query_stride,
             layers.out + layer * layers.out_stride, layers.scratch[static_cast<size_t>(hand.rank)]);
    });
    cache.key = static_cast<char*>(cache.key) + layers.cache_stride;
    cache.value = static_cast<char*>(cache.value) + layers.cache_stride;
  }
}

struct FreePlan {
  void operator()(AttentionPlan* plan) const { free_plan(plan); }
};

struct FreeAligned {
  void operator()(char* bytes) const { ::operator delete[](bytes, std::align_val_t(64)); }
};

}  // namespace

}  // namespace catenary

#pragma GCC visibility push(default)
extern "C" {

using namespace catenary;

int32_t catenary_attention_supported(const Cache* cache, int32_t heads) {
  return attention_supported(*cache, heads) ? 1 : 0;
}

int32_t catenary_multiplies_pairs() { return kMultipliesPairs ? 1 : 0; }

// Attends with the same query in `layers` caches, `cache_stride` bytes from one to the next, on `threads`
// threads. query float32 [rows, query_stride]; out float32 [rows, heads * head_dim] of each layer,
// `out_stride` floats from one to the next. Returns 0 if there is no memory.
int32_t catenary_attend(
    const Cache* cache, const AttentionShape* shape, const Span* spans, int64_t count, int64_t layers,
    int64_t cache_stride, const float* query, int64_t query_stride, float* out, int64_t out_stride,
    int32_t threads) {
  try {
    std::unique_ptr<AttentionPlan, FreePlan> plan(
        plan_attention(spans, count, *cache, shape->heads, threads));
    if (!plan) return 0;
    Layers work{plan.get(), *shape, *cache, layers, cache_stride, out_stride, query, query_stride, out, {}};
    std::vector<std::unique_ptr<char[], FreeAligned>> scratch;
    for (int32_t rank = 0; rank < threads; ++rank) {
      scratch.emplace_back(new (std::align_val_t(64)) char[attention_scratch(*plan)]);
      work.scratch.push_back(scratch.back().get());
    }
    Team team(threads, nullptr, 0);
    attend_layers(team, work);
    return 1;
  } catch (...) {
    return 0;
  }
}

void catenary_write_kv(const Cache* cache, int64_t slot, const float* key, const float* value) {
  write_kv(*cache, slot, key, value);
}

void catenary_rms_norm(const float* x, const float* weight, int32_t size, float eps, float* out) {
  rms_norm(x, weight, size, eps, out);
}

void catenary_rotate(float* head, const float* cosines, const float* sines, int32_t rotated) {
  rotate(head, cosines, sines, rotated);
}

// x float32 [count], a multiple of 16; in place.
void catenary_activate(int32_t activation, float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(x + i, activate(static_cast<Activation>(activation), load(x + i)));
  }
}
}
#pragma GCC visibility pop
