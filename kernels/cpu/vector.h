// One vector type of the instruction set that this file is compiled for, and what the kernels do with it.
//
// GCC's vector extension, which clang shares: no intrinsics, so that the same source is built once for each
// instruction set. Every sum has one fixed order, whatever is computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sluice {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec broadcast(float x) { return Vec{} + x; }

// Sum of the lanes, always halved in the same way.
inline float sum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float greatest(Vec v) {
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// e^x to two units in the last place (Cephes' polynomial); 0 below -87, as softmax wants it. NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec clamped = x < -87.0f ? broadcast(-87.0f) : (x > 88.0f ? broadcast(88.0f) : x);
  const Vec scaled = clamped * 1.44269504088896341f;
  const Vec half = scaled < 0.0f ? broadcast(-0.5f) : broadcast(0.5f);
  const IntVec power = __builtin_convertvector(scaled + half, IntVec);
  const Vec whole = __builtin_convertvector(power, Vec);
  const Vec r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec mantissa = p * r * r + r + 1.0f;
  const IntVec bits = (power + 127) << 23;
  Vec two_to_power;
  std::memcpy(&two_to_power, &bits, sizeof bits);
  const Vec result = x < -87.0f ? Vec{} : mantissa * two_to_power;
  return x == x ? result : x;
}

}  // namespace sluice
