// What is done to one row element by element: norms, rotary positions, writing to the KV cache.
#include <cmath>

#include "kernels.h"

namespace catenary {

namespace {

template <typename Element>
void write_slot(const Cache& cache, int64_t slot, const float* key, const float* value) {
  const int64_t count = static_cast<int64_t>(cache.kv_heads) * cache.head_dim;
  convert(key, count, static_cast<Element*>(cache.key) + slot * count);
  convert(value, count, static_cast<Element*>(cache.value) + slot * count);
}

}  // namespace

void rms_norm(const float* x, const float* weight, int32_t size, float eps, float* out) {
  F32 squares{}, more{};
  int32_t i = 0;
  // Two sums: one alone waits for its own last addition.
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const F32 left = load(x + i), right = load(x + i + kLanes);
    squares = fma(left, left, squares);
    more = fma(right, right, more);
  }
  float rest = 0.0f;
  for (; i < size; ++i) rest += x[i] * x[i];
  const float factor = 1.0f / std::sqrt((sum(squares + more) + rest) / static_cast<float>(size) + eps);
  i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

void rotate(float* head, const float* cosines, const float* sines, int32_t rotated) {
  const int32_t half = rotated / 2;
  float* other = head + half;
  int32_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 a = load(head + i), b = load(other + i), c = load(cosines + i), s = load(sines + i);
    store(head + i, fma(a, c, -(b * s)));
    store(other + i, fma(b, c, a * s));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = other[i];
    head[i] = a * cosines[i] - b * sines[i];
    other[i] = b * cosines[i] + a * sines[i];
  }
}

void write_kv(const Cache& cache, int64_t slot, const float* key, const float* value) {
  if (cache.kind == CacheKind::kFloat32) {
    write_slot<float>(cache, slot, key, value);
  } else {
    write_slot<Bf16>(cache, slot, key, value);
  }
}

}  // namespace catenary
