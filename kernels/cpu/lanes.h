// Vector operations of the sampler besides vector.h: sums in double precision, logarithms.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace sluice {

typedef double Doubles __attribute__((vector_size(LANES * 4)));  // LANES / 2 numbers
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint64_t Wide __attribute__((vector_size(LANES * 4)));  // LANES / 2 words, each a pair of lanes

// Multiplies the low words of each pair of lanes to 64-bit products.
inline Wide multiply_low(Wide a, Wide b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Wide>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Wide>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Calls take(index) for each value of `from` [num, padded with -inf] that is at least `floor` and above -inf.
template <typename Take>
inline void each_above(const float* from, int64_t num, float floor, Take take) {
  for (int64_t at = 0; at < num; at += LANES) {
    const Vec values = load(from + at);
    for (uint32_t left = bits_of((values >= floor) & (values > -__builtin_inff())); left; left &= left - 1)
      take(at + __builtin_ctz(left));
  }
}

// A sum in double precision, lane by lane and then over the lanes: one fixed order. It is kept in two halves, since GCC
// 12 keeps vectors wider than a register in memory.
struct Sums {
  Doubles lower = {}, upper = {};

  void add(Vec v) {
#if defined(__AVX512DQ__)
    lower += _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, v, 0));
    upper += _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, v, 1));
#elif defined(__AVX__)
    lower += _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    upper += _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
    for (int lane = 0; lane < LANES / 2; ++lane) lower[lane] += v[lane], upper[lane] += v[lane + LANES / 2];
#endif
  }

  double all() const {
    double found = 0.0;
    for (int lane = 0; lane < LANES / 2; ++lane) found += lower[lane];
    for (int lane = 0; lane < LANES / 2; ++lane) found += upper[lane];
    return found;
  }
};

inline double total(const float* from, int64_t num) {
  Sums sums;
  for (int64_t at = 0; at < num; at += LANES) sums.add(load(from + at));
  return sums.all();
}

// ln(x) to two units in the last place (Cephes' polynomial), x positive and normal.
inline Vec log(Vec x) {
  IntVec bits;
  std::memcpy(&bits, &x, sizeof x);
  IntVec power = ((bits >> 23) & 255) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  Vec m;
  std::memcpy(&m, &bits, sizeof m);  // in [0.5, 1)
  const IntVec small = m < 0.707106781186547524f;
  power += small;  // a true lane is -1
  m = (small ? m + m : m) - 1.0f;
  const Vec z = m * m;
  Vec p = broadcast(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Vec e = __builtin_convertvector(power, Vec);
  return m + (m * z * p - e * 2.12194440e-4f - 0.5f * z) + e * 0.693359375f;
}

}  // namespace sluice
