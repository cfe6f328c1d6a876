// Integer dot products: unsigned bytes (weights) times signed bytes (activations), four of each to a 32-bit lane.
//
// With VNNI that is one instruction. Without it, weights of 8 bits are split into their even and odd bytes and
// multiplied in 16 bits; those of 4 bits are so small that eight sums of two products fit into 16 bits, which takes
// half as many instructions. No intermediate saturates: the sum is the exact integer, and every instruction set gives
// the same bits.
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

inline void store_bytes(uint8_t* to, Bytes v) { std::memcpy(to, &v, sizeof v); }

struct ByteQuad {  // four activations
  int8_t at[4];
};

inline int32_t word(const ByteQuad& x) {
  int32_t four;
  std::memcpy(&four, x.at, sizeof four);
  return four;
}

inline void store_quads(ByteQuad* to, IntVec levels) { store(to->at, levels); }

#if defined(__AVX512VNNI__)

constexpr int DOT_VECS = 4;  // vectors of weights at once, and rows of x: what the registers hold
constexpr int DOT_ROWS = 6;
constexpr int KEPT_ROWS = 3;  // of which the registers hold what is summed of groups, too

// How products of BITS are summed: a form of the activations, one of the weights, and a sum of up to 8 quads that
// begins with a number, which both of its ends are told.
template <int BITS>
struct Dot {
  using Quad = ByteQuad;
  using Weights = Bytes;

  struct Sum {
    IntVec total;
    void begin(int32_t start) { total = (IntVec)_mm512_set1_epi32(start); }
    void add(Weights w, Quad x) {
      total = (IntVec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, _mm512_set1_epi32(word(x)));
    }
    IntVec all(int32_t) const { return total; }
  };
};

#else

constexpr int DOT_VECS = 2;
constexpr int KEPT_ROWS = 0;
constexpr int DOT_ROWS = LANES == 16 ? 8 : 3;  // of 8 rows a second tile took 7 % more; 16 registers hold 3

typedef int16_t Narrow __attribute__((vector_size(LANES * 2)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));

// Sums of two neighbouring products of 16 bits.
inline IntVec multiply_pairs(Words a, int32_t pair) {
#if defined(__AVX512BW__)
  return (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(pair));
#else
  return (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(pair));
#endif
}

// Sums of two neighbouring products of 8 bits, in 16.
inline Shorts multiply_bytes(Bytes a, int32_t four) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(four));
#else
  return (Shorts)_mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(four));
#endif
}

struct WordQuad {
  int16_t at[4];  // 0, 2, 1, 3

  // Each read by itself: GCC 12 makes one read of two, and spreads its halves in the port that products need.
  int32_t pair(int first) const {
    int32_t two;
    std::memcpy(&two, at + first, sizeof two);
    return two;
  }
};

template <int... LANE>
inline Narrow swap_middles(Narrow v, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(v, v, (LANE % 4 == 1 || LANE % 4 == 2 ? LANE ^ 3 : LANE)...);
}

inline void store_quads(WordQuad* to, IntVec levels) {
  const Narrow narrow = swap_middles(__builtin_convertvector(levels, Narrow), std::make_integer_sequence<int, LANES>());
  std::memcpy(to, &narrow, sizeof narrow);
}

// How products of BITS are summed: a form of the activations, one of the weights, and a sum of up to 8 quads that
// begins with a number, which both of its ends are told.
template <int BITS>
struct Dot {
  using Quad = WordQuad;

  struct Weights {
    Words even, odd;
    explicit Weights(Bytes bytes) : even((Words)bytes & 0xff), odd((Words)bytes >> 8) {}
  };

  struct Sum {
    IntVec total;
    void begin(int32_t start) { total = IntVec{} + start; }
    void add(const Weights& w, const Quad& x) {
      total = total + multiply_pairs(w.even, x.pair(0)) + multiply_pairs(w.odd, x.pair(2));
    }
    IntVec all(int32_t) const { return total; }
  };
};

template <>
struct Dot<4> {
  using Quad = ByteQuad;
  using Weights = Bytes;

  struct Sum {
    Shorts part;  // 8 * 2 * 15 * 127 = 30480 < 2^15
    void begin(int32_t) { part = Shorts{}; }
    void add(Weights w, Quad x) { part += multiply_bytes(w, word(x)); }
    IntVec all(int32_t start) const { return multiply_pairs((Words)part, 0x00010001) + start; }
  };
};

#endif

}  // namespace sluice
