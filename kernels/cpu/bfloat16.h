// Pairs of bfloat16 numbers, which processors with AVX-512 BF16 multiply two by two.
#pragma once

#include "vector.h"

namespace sluice {

#if defined(__AVX512BF16__)

constexpr int64_t NUMBERS = LINE / 2;  // bfloat16 numbers of a cache line

// Rounds two vectors to the NUMBERS of a cache line, ties to even. What is below normal numbers becomes zero.
inline Vec rounded(const float* lower, const float* upper) {
  return (Vec)_mm512_cvtne2ps_pbh((__m512)load(upper), (__m512)load(lower));
}

// Adds the products of a pair of numbers of `a` and one of `b` to each lane, one product after the other.
inline void add_pairs(Vec& sum, __m512i a, __m512i b) {
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

inline __m512i broadcast_pair(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// Returns pairs of the numbers of two rows: of the first LANES numbers of each, or of the others.
inline __m512i interleaved(__m512i one, __m512i other, bool is_upper) {
  alignas(64) static constexpr uint16_t TURNS[2][NUMBERS] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  return _mm512_permutex2var_epi16(one, _mm512_load_si512(TURNS[is_upper]), other);
}

// Interleaves the numbers of two rows: to [dim, 2].
inline void interleave(const uint16_t* one, const uint16_t* other, int64_t dim, uint16_t* to) {
  for (int64_t d = 0; d < dim; d += NUMBERS) {
    const __m512i a = _mm512_loadu_si512(one + d), b = _mm512_loadu_si512(other + d);
    _mm512_store_si512(to + d * 2, interleaved(a, b, false));
    _mm512_store_si512(to + d * 2 + NUMBERS, interleaved(a, b, true));
  }
}

#endif

}  // namespace sluice
