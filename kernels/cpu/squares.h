// Transposing squares of four lanes in four rows.
#pragma once

#include "vector.h"

namespace sluice {

#if defined(__AVX512F__)

constexpr __mmask8 ALL_PAIRS = 0xff;  // mask of all pairs of lanes: see ALL

// Quarter q of row i of four gets lanes 4 · q + i of all rows.
[[gnu::always_inline]] inline void transpose_four(__m512i* v) {
  const __m512i low[2] = {_mm512_maskz_unpacklo_epi32(ALL, v[0], v[1]), _mm512_maskz_unpacklo_epi32(ALL, v[2], v[3])};
  const __m512i high[2] = {_mm512_maskz_unpackhi_epi32(ALL, v[0], v[1]), _mm512_maskz_unpackhi_epi32(ALL, v[2], v[3])};
  v[0] = _mm512_maskz_unpacklo_epi64(ALL_PAIRS, low[0], low[1]);
  v[1] = _mm512_maskz_unpackhi_epi64(ALL_PAIRS, low[0], low[1]);
  v[2] = _mm512_maskz_unpacklo_epi64(ALL_PAIRS, high[0], high[1]);
  v[3] = _mm512_maskz_unpackhi_epi64(ALL_PAIRS, high[0], high[1]);
}

#endif

}  // namespace sluice
