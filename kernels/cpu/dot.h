// Integer dot products: unsigned bytes (weights) times signed bytes (activations), four of each to a 32-bit lane.
//
// With VNNI that is one instruction. Without it the signed side is kept in 16 bits and the unsigned side is split into
// its even and odd bytes, so that no intermediate saturates. Either way the sum is the exact integer: every instruction
// set gives the same bits.
#pragma once

#include "vector.h"

namespace sluice {

typedef uint8_t Bytes __attribute__((vector_size(LANES * 4)));
typedef uint16_t Words __attribute__((vector_size(LANES * 4)));

inline Bytes load_bytes(const uint8_t* from) {
  Bytes v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

#if defined(__AVX512VNNI__)

constexpr int DOT_VECS = 4;  // vectors of weights at once, and rows of x: what the registers hold
constexpr int DOT_ROWS = 6;

struct Quad {  // four activations
  int8_t at[4];
};

inline void store_quads(Quad* to, IntVec levels) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(ALL, (__m512i)levels));
}

struct Weights {
  Bytes all;
  explicit Weights(Bytes bytes) : all(bytes) {}
};

inline IntVec dot(IntVec sum, const Weights& w, const Quad& x) {
  int32_t four;
  std::memcpy(&four, x.at, sizeof four);
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.all, _mm512_set1_epi32(four));
}

#else

constexpr int DOT_VECS = 2;
constexpr int DOT_ROWS = LANES == 16 ? 8 : 3;

struct Quad {
  int16_t at[4];  // 0, 2, 1, 3
};

typedef int16_t Narrow __attribute__((vector_size(LANES * 2)));

template <int... LANE>
inline Narrow swap_middles(Narrow v, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(v, v, (LANE % 4 == 1 || LANE % 4 == 2 ? LANE ^ 3 : LANE)...);
}

inline void store_quads(Quad* to, IntVec levels) {
  const Narrow narrow =
      swap_middles(__builtin_convertvector(levels, Narrow), std::make_integer_sequence<int, LANES>());
  std::memcpy(to, &narrow, sizeof narrow);
}

struct Weights {
  Words even, odd;
  explicit Weights(Bytes bytes) : even((Words)bytes & 0xff), odd((Words)bytes >> 8) {}
};

inline IntVec multiply_pairs(Words a, int32_t pair) {
#if defined(__AVX512BW__)
  return (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(pair));
#else
  return (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(pair));
#endif
}

inline IntVec dot(IntVec sum, const Weights& w, const Quad& x) {
  int32_t pairs[2];
  std::memcpy(pairs, x.at, sizeof pairs);
  return sum + multiply_pairs(w.even, pairs[0]) + multiply_pairs(w.odd, pairs[1]);
}

#endif

}  // namespace sluice
