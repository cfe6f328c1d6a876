// Instructions that this machine may lack, written out as their definitions; the compiler includes this first.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

inline float widened(uint16_t number) {
  const uint32_t bits = static_cast<uint32_t>(number) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if ((bits & 0x7f800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);  // below normal numbers: zero
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m512i dpbusd(__m512i sum, __m512i a, __m512i b) {
  int32_t total[16];
  uint8_t left[64];
  int8_t right[64];
  std::memcpy(total, &sum, 64), std::memcpy(left, &a, 64), std::memcpy(right, &b, 64);
  for (int i = 0; i < 64; ++i) total[i / 4] += left[i] * right[i];
  std::memcpy(&sum, total, 64);
  return sum;
}

inline __m512 dpbf16(__m512 sum, __m512bh a, __m512bh b) {
  float total[16];
  uint16_t left[32], right[32];
  std::memcpy(total, &sum, 64), std::memcpy(left, &a, 64), std::memcpy(right, &b, 64);
  for (int i = 31; i >= 0; --i) total[i / 2] += widened(left[i]) * widened(right[i]);
  std::memcpy(&sum, total, 64);
  return sum;
}

inline __m256bh cvtneps(__m512 from) {
  float values[16];
  uint16_t numbers[16];
  std::memcpy(values, &from, 64);
  for (int i = 0; i < 16; ++i) numbers[i] = rounded(values[i]);
  __m256bh to;
  std::memcpy(&to, numbers, 32);
  return to;
}

inline __m512bh cvtne2ps(__m512 upper, __m512 lower) {
  const __m256bh halves[2] = {cvtneps(lower), cvtneps(upper)};
  __m512bh to;
  std::memcpy(&to, halves, 64);
  return to;
}

}  // namespace emulated

// Said behind the compiler's own headers, which would take it for leave to use what this machine lacks.
#if defined(EMULATED_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATED_BF16)
#define __AVX512BF16__ 1
#endif
#if defined(EMULATED_AMX)
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#endif

#define _mm512_dpbusd_epi32 emulated::dpbusd
#define _mm512_dpbf16_ps emulated::dpbf16
#define _mm512_cvtneps_pbh emulated::cvtneps
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps
