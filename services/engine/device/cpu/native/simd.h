// Vectors of one instruction set. The same sources are compiled once for each: what differs stands here
// alone.
//
// Arithmetic is that of the compiler's vector extensions, so the portable path is the same code with short
// vectors.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace catenary {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr int kBytes = 4 * kLanes;

typedef float F32 __attribute__((vector_size(kBytes)));
typedef int32_t I32 __attribute__((vector_size(kBytes)));
typedef uint32_t U32 __attribute__((vector_size(kBytes)));
typedef uint16_t U16 __attribute__((vector_size(kBytes / 2)));
typedef int8_t I8 __attribute__((vector_size(kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

// A brain float as it lies in memory: the upper half of a float.
struct Bf16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Vector, typename Element>
inline Vector load_as(const Element* at) {
  Vector vector;
  std::memcpy(&vector, at, sizeof vector);
  return vector;
}

inline F32 splat(float value) { return F32{} + value; }

inline F32 load(const float* at) { return load_as<F32>(at); }

inline F32 widen(U16 halves) { return bits_as<F32>(__builtin_convertvector(halves, U32) << 16); }

inline F32 load(const Bf16* at) { return widen(load_as<U16>(at)); }

inline void store(float* at, F32 value) { std::memcpy(at, &value, sizeof value); }

// Rounds to the nearest, ties to even. What is no number stays none.
inline U16 narrow(F32 value) {
#if defined(__AVX512BF16__)
  return bits_as<U16>(_mm512_cvtneps_pbh(bits_as<__m512>(value)));
#else
  const U32 bits = bits_as<U32>(value);
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 nan = bits_as<U32>(value != value);
  return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), U16);
#endif
}

inline void store(Bf16* at, F32 value) {
  const U16 halves = narrow(value);
  std::memcpy(at, &halves, sizeof halves);
}

inline float to_float(Bf16 value) { return bits_as<float>(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(float value) { return value; }

inline void from_float(float value, float* at) { *at = value; }
inline void from_float(float value, Bf16* at) {
  const uint32_t bits = bits_as<uint32_t>(value);
  at->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Writes `count` floats as elements of another kind.
template <typename Element>
inline void convert(const float* from, int64_t count, Element* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) from_float(from[i], to + i);
}

// a * b + c, in one rounding where the instruction set has it. The build forbids compilers to contract what
// is not written so: a sum must not depend on the loop around it.
inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return bits_as<F32>(_mm512_fmadd_ps(bits_as<__m512>(a), bits_as<__m512>(b), bits_as<__m512>(c)));
#elif defined(__FMA__)
  return bits_as<F32>(_mm256_fmadd_ps(bits_as<__m256>(a), bits_as<__m256>(b), bits_as<__m256>(c)));
#else
  return a * b + c;
#endif
}

inline F32 min(F32 a, F32 b) { return a < b ? a : b; }
// Keeps `a` if it is no number.
inline F32 max(F32 a, F32 b) { return a < b ? b : a; }

// Halves are added to one another until one lane is left: lane i and lane i + kLanes / 2, and so on.
inline float sum(F32 value) {
#if defined(__AVX512F__)
  const auto eight = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  const auto eight = value;
#endif
#if defined(__AVX2__)
  const auto four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
  const auto four = value;
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float largest(F32 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bits_as<__m512>(value));
#else
  float most = value[0];
  for (int lane = 1; lane < kLanes; ++lane) most = most < value[lane] ? value[lane] : most;
  return most;
#endif
}

// The first `count` lanes of four bytes at `at`, or all if it is more; zeros in the others. Nothing behind is
// read.
inline U32 load_first(const void* at, int count) {
#if defined(__AVX512F__)
  const __mmask16 lanes = count < kLanes ? static_cast<__mmask16>((1u << count) - 1) : 0xffff;
  return bits_as<U32>(_mm512_maskz_loadu_epi32(lanes, at));
#else
  U32 lanes{};
  std::memcpy(&lanes, at, count < kLanes ? 4 * static_cast<uint32_t>(count) : sizeof lanes);
  return lanes;
#endif
}

// Whether products of brain floats cost less than those of floats.
#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Lanes of two brain floats each, for dot products.
inline U32 load_pairs(const Bf16* at) { return load_as<U32>(at); }

inline U32 splat_pair(const Bf16* at) {
  uint32_t pair;
  std::memcpy(&pair, at, sizeof pair);
  return U32{} + pair;
}

// Two vectors as pairs of brain floats, the first one's in the lower halves.
inline U32 to_pairs(F32 low, F32 high) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t kTurns[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh both = _mm512_cvtne2ps_pbh(bits_as<__m512>(high), bits_as<__m512>(low));
  return bits_as<U32>(_mm512_permutexvar_epi16(_mm512_load_si512(kTurns), bits_as<__m512i>(both)));
#else
  return __builtin_convertvector(narrow(low), U32) | (__builtin_convertvector(narrow(high), U32) << 16);
#endif
}

// acc + a0 * b0 + a1 * b1 in each lane.
inline F32 dot_pairs(F32 acc, U32 a, U32 b) {
#if defined(__AVX512BF16__)
  return bits_as<F32>(_mm512_dpbf16_ps(bits_as<__m512>(acc), bits_as<__m512bh>(a), bits_as<__m512bh>(b)));
#else
  acc = fma(bits_as<F32>(a << 16), bits_as<F32>(b << 16), acc);
  return fma(bits_as<F32>(a & 0xffff0000u), bits_as<F32>(b & 0xffff0000u), acc);
#endif
}

// One unit of four bytes, whatever was written there, in each lane.
inline U32 splat_unit(const uint32_t* at) { return U32{} + load_as<uint32_t>(at); }

// Lanes of four bytes each, for dot products.
inline I32 load_quads(const void* at) { return load_as<I32>(static_cast<const uint8_t*>(at)); }

inline I32 splat_quad(const void* at) {
  int32_t quad;
  std::memcpy(&quad, at, sizeof quad);
  return I32{} + quad;
}

// acc + sum of four products in each lane: bytes of `a` without sign, of `b` with. Exact.
inline I32 dot_quads(I32 acc, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
  return bits_as<I32>(_mm512_dpbusd_epi32(bits_as<__m512i>(acc), bits_as<__m512i>(a), bits_as<__m512i>(b)));
#elif defined(__AVX2__)
  // Pairs of 16 bits cannot overflow, as sums of two products of bytes would.
  const __m256i x = bits_as<__m256i>(a), y = bits_as<__m256i>(b);
  const __m256i even = _mm256_madd_epi16(
      _mm256_and_si256(x, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
  return acc + bits_as<I32>(even) + bits_as<I32>(odd);
#else
  for (int shift = 0; shift < 32; shift += 8) {
    const I32 left = (a >> shift) & 0xff;
    const I32 right = (b << (24 - shift)) >> 24;
    acc += left * right;
  }
  return acc;
#endif
}

inline F32 to_floats(I32 value) { return __builtin_convertvector(value, F32); }

// e^x within 2 units of the last place: 0 below -87.3, finite up to 88. What is no number stays none.
// Range reduction by ln 2 in two parts and a polynomial of degree 6 (Taylor's, on [-ln 2 / 2, ln 2 / 2]).
inline F32 exp(F32 x) {
  const F32 least = splat(-87.3f), most = splat(88.0f);
  F32 y = x > most ? most : x;
  y = y < least ? least : y;
  // Added to a small number, this leaves the whole number nearest to it, and 127, in the lowest bits: the
  // exponent of a float.
  const F32 shift = splat(12582912.0f + 127.0f);
  const F32 shifted = fma(y, splat(1.44269504f), shift);
  const F32 n = shifted - shift;
  F32 r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const F32 result = p * bits_as<F32>(bits_as<U32>(shifted) << 23);
  return x < least ? F32{} : result;
}

}  // namespace catenary
