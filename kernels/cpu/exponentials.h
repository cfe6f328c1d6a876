// e^x and tanh(x) of vectors, by polynomials.
#pragma once

#include "vector.h"

namespace sluice {

// e^r for |r| <= ln(2) / 2, by Cephes' polynomial.
inline Vec exp_near_zero(Vec r) {
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

constexpr float LN2_UPPER = 0.693359375f, LN2_LOWER = 2.12194440e-4f;  // ln(2) = LN2_UPPER - LN2_LOWER

// e^x to two units in the last place; 0 below -87, as softmax needs. NaN stays NaN.
inline Vec exp(Vec x) {
#if defined(__AVX512F__)
  // Of two numbers of which one is NaN, these instructions return the second one.
  const __m512 most = _mm512_maskz_min_ps(ALL, (__m512)broadcast(88.0f), (__m512)x);
  const Vec clamped = (Vec)_mm512_maskz_max_ps(ALL, (__m512)broadcast(-87.0f), most);
  const Vec whole = (Vec)_mm512_maskz_roundscale_ps(ALL, (__m512)(clamped * 1.44269504088896341f), 0);  // nearest
  const Vec mantissa = exp_near_zero(clamped - whole * LN2_UPPER + whole * LN2_LOWER);
  const __mmask16 is_some = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-87.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(is_some, (__m512)mantissa, (__m512)whole);
#else
  const Vec clamped = x < -87.0f ? broadcast(-87.0f) : (x > 88.0f ? broadcast(88.0f) : x);
  const Vec scaled = clamped * 1.44269504088896341f;
  const Vec half = scaled < 0.0f ? broadcast(-0.5f) : broadcast(0.5f);
  const IntVec power = __builtin_convertvector(scaled + half, IntVec);
  const Vec whole = __builtin_convertvector(power, Vec);
  const Vec mantissa = exp_near_zero(clamped - whole * LN2_UPPER + whole * LN2_LOWER);
  const IntVec bits = (power + 127) << 23;
  Vec two_to_power;
  std::memcpy(&two_to_power, &bits, sizeof bits);
  const Vec result = x < -87.0f ? Vec{} : mantissa * two_to_power;
  return x == x ? result : x;
#endif
}

// The same for x <= 0, or NaN, by fewer instructions; below -87 a number under 2e-38, or 0.
inline Vec exp_of_negative(Vec x) {
#if defined(__AVX512F__)
  const Vec clamped = (Vec)_mm512_maskz_max_ps(ALL, (__m512)broadcast(-120.0f), (__m512)x);  // NaN stays, as above
  const Vec whole = (Vec)_mm512_maskz_roundscale_ps(ALL, (__m512)(clamped * 1.44269504088896341f), 0);
  const Vec mantissa = exp_near_zero(clamped - whole * LN2_UPPER + whole * LN2_LOWER);
  return (Vec)_mm512_maskz_scalef_ps(ALL, (__m512)mantissa, (__m512)whole);
#else
  return exp(x);
#endif
}

// tanh(x) to three units in the last place (Cephes' polynomial where x is small). NaN stays NaN.
inline Vec tanh(Vec x) {
  const Vec size = absolute(x), z = x * x;
  const Vec large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  Vec p = broadcast(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec small = p * z * x + x;
  return size < 0.625f ? small : (x < 0.0f ? -large : large);
}

}  // namespace sluice
