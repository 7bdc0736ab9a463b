// Activations of gated layers, a vector at a time.
#pragma once

#include "simd.h"

namespace catenary {

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3 };

// 1 / (1 + e^-x). exp() is finite up to 88: below, the result is 0 within float32.
inline F32 sigmoid(F32 x) { return 1.0f / (1.0f + exp(-x)); }

// Within 4 units of the last place. Near zero, where 2 * sigmoid(2x) - 1 would lose them, by Taylor's
// polynomial.
inline F32 tanh(F32 x) {
  constexpr float kTerms[] = {-17.0f / 315, 62.0f / 2835, -1382.0f / 155925, 21844.0f / 6081075};
  const F32 square = x * x;
  F32 p = splat(kTerms[3]);
  for (int term = 2; term >= 0; --term) p = fma(p, square, splat(kTerms[term]));
  p = fma(p, square, splat(2.0f / 15));
  p = fma(p, square, splat(-1.0f / 3));
  const F32 near = fma(p * square, x, x);
  const F32 far = fma(splat(2.0f), sigmoid(2.0f * x), splat(-1.0f));
  return max(x, -x) < 0.4f ? near : far;
}

// The error function within 2e-7 (Abramowitz and Stegun, 7.1.26).
inline F32 erf(F32 x) {
  const F32 size = max(x, -x);
  const F32 t = 1.0f / fma(splat(0.3275911f), size, splat(1.0f));
  F32 p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const F32 result = 1.0f - p * t * exp(-size * size);
  return x < 0.0f ? -result : result;
}

inline F32 activate(Activation activation, F32 x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGeluTanh:
      // sqrt(2 / pi) * (x + 0.044715 x^3)
      return 0.5f * x * (1.0f + tanh(0.7978845608f * x * fma(0.044715f * x, x, splat(1.0f))));
    case Activation::kGelu:
      return 0.5f * x * (1.0f + erf(0.7071067812f * x));
    case Activation::kNone:
      break;
  }
  return x;
}

}  // namespace catenary
