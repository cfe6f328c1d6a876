// The numbers that low-rank products are computed with, in the formats that A and B are stored in.
//
// A kind says how a row of A meets a row of x, and how rows of B meet numbers of A · x. `Widened` computes in float32.
// `Paired` multiplies bfloat16 numbers two by two and rounds what they meet, as pairs.h does; its sums are float32.
#pragma once

#include "adapters.h"
#include "packed.h"

namespace sluice {

struct Float16 {
  uint16_t bits;
};

inline Vec load(const Float16* from) { return load_half(reinterpret_cast<const uint8_t*>(from)); }

inline int64_t size_of(Stored format) { return format == Stored::FLOAT32 ? 4 : 2; }  // bytes of a number

template <typename Stored>
struct Widened {
  using Element = Stored;  // of A and B
  using Number = float;    // of x and of A · x
  using Weights = Vec;
  static constexpr int64_t INPUTS = LANES;  // at once
  static constexpr int64_t RANKS = 1;       // at once

  static Vec add(Vec sum, Vec x, Vec weights) { return sum + x * weights; }
  static Vec along(const Number* x) { return load(x); }
  static Vec weights_along(const Element* a) { return load(a); }
  static Vec spread(const Number* low) { return broadcast(*low); }
  static Vec across(const Element* const (&b)[RANKS]) { return load(b[0]); }
};

#if defined(__AVX512BF16__)

struct Paired {
  using Element = uint16_t;
  using Number = uint16_t;
  using Weights = __m512bh;
  static constexpr int64_t INPUTS = 2 * LANES;
  static constexpr int64_t RANKS = 2;

  static Vec add(Vec sum, Weights x, Weights weights) { return (Vec)_mm512_dpbf16_ps((__m512)sum, x, weights); }

  static Weights along(const uint16_t* x) {
    Weights both;
    std::memcpy(&both, x, sizeof both);
    return both;
  }

  static Weights weights_along(const Element* a) { return along(a); }

  static Weights spread(const Number* low) {
    int32_t both;
    std::memcpy(&both, low, sizeof both);
    return (Weights)_mm512_set1_epi32(both);
  }

  // LANES numbers of two rows, side by side.
  static Weights across(const Element* const (&b)[RANKS]) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b[0]));
    const IntVec lower = (IntVec)_mm512_maskz_cvtepu16_epi32(ALL, first), upper = (IntVec)load(b[1]);
    return (Weights)(lower | upper);
  }
};

#endif

// Rounds to bfloat16, as pairs.h does where there are instructions for it.
inline void round_to(uint16_t* to, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  store(to, v);
#endif
}

// Whether a linear rounds its rows of x to bfloat16, so that products beside it do.
inline bool rounds(const Packed& layer) {
#if defined(__AVX512BF16__)
  return layer.format == Format::BFLOAT16;
#else
  return false;
#endif
}

// Calls work with a value of the kind that computes with what is stored so.
template <typename Work>
inline void with_kind(Stored format, bool rounds, const Work& work) {
#if defined(__AVX512BF16__)
  if (rounds && format == Stored::BFLOAT16) return work(Paired{});
#endif
  switch (format) {
    case Stored::FLOAT32: return work(Widened<float>{});
    case Stored::BFLOAT16: return work(Widened<uint16_t>{});
    case Stored::FLOAT16: return work(Widened<Float16>{});
  }
}

}  // namespace sluice
