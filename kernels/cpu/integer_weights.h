// Queries and softmax weights, rounded to integers of 16 bits and split into bytes, for the products of bytes of
// processors with VNNI.
#pragma once

#include "byte_rows.h"

namespace sluice {

#if defined(__AVX512VNNI__)

constexpr float MOST_QUERY = 127 * 256 + 127;  // split into two signed bytes
constexpr float MOST_WEIGHT = 65535;           // split into two unsigned ones
constexpr int32_t OFFSET = 128;                // added to keys, since one factor is unsigned

// Masks of all numbers: see ALL.
constexpr __mmask64 ALL_BYTES = ~0ull;
constexpr __mmask32 ALL_WORDS = ~0u;

// Returns the greatest magnitude of a row; NaN if one of the numbers is.
inline float greatest_magnitude(const float* x, int64_t num) {
  IntVec most{};
  for (int64_t i = 0; i < num; i += LANES) most = greater(most, magnitude_bits(load(x + i)));
  const int32_t bits = greatests<1>(&most)[0];
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The queries of a tile.
struct RoundedQueries {
  float scales[QUERIES];
  int32_t starts[QUERIES];  // what the offset of keys adds, negative
  // By chunk: upper bytes, lower bytes. Vector i of each has in its quarter q the four numbers from 16 · q + 4 · i on,
  // four times.
  alignas(64) int8_t numbers[QUERIES][MAX_DIM / CHUNK][2][4][LINE];

  void take(int r, const float* q, int64_t dim, float scale) {
    const float peak = greatest_magnitude(q, dim), by = peak > 1e-30f ? MOST_QUERY / peak : 0.0f;
    alignas(64) int8_t bytes[2][MAX_DIM + CHUNK];
    IntVec total{};
    for (int64_t d = 0; d < dim; d += LANES) {
      const IntVec levels = nearest(load(q + d) * by), upper = (levels + 128) >> 8;
      total += levels;
      store(bytes[0] + d, upper), store(bytes[1] + d, levels);
    }
    for (int part = 0; part < 2; ++part) {
      std::fill_n(bytes[part] + dim, CHUNK, 0);
      for (int64_t d = 0; d < dim; d += CHUNK) spread(bytes[part] + d, numbers[r][d / CHUNK][part]);
    }
    scales[r] = (peak + peak * 0.0f) / MOST_QUERY * scale;  // NaN if the peak is infinite
    starts[r] = -OFFSET * sums<1>(&total)[0];
  }

 private:
  static void spread(const int8_t* bytes, int8_t (*to)[LINE]) {
    const __m512i all = _mm512_load_si512(bytes);
    _mm512_store_si512(to[0], _mm512_maskz_shuffle_epi32(ALL, all, _MM_PERM_AAAA));
    _mm512_store_si512(to[1], _mm512_maskz_shuffle_epi32(ALL, all, _MM_PERM_BBBB));
    _mm512_store_si512(to[2], _mm512_maskz_shuffle_epi32(ALL, all, _MM_PERM_CCCC));
    _mm512_store_si512(to[3], _mm512_maskz_shuffle_epi32(ALL, all, _MM_PERM_DDDD));
  }
};

// The softmax weights of queries in a block of keys, times the scales of values.
struct RoundedWeights {
  static constexpr int NUM = KEYS_OF<int8_t>, VECTORS = NUM / LANES;
  static_assert(VECTORS == 4);

  // Four keys fill a lane: lane 4 · q + v has those from LANES · v + 4 · q on.
  alignas(64) uint8_t upper[QUERIES][NUM], lower[QUERIES][NUM];
  float scales[LANES];  // NaN if a weight is

  // Rounds the weights of `count` queries, up to MOST.
  template <int MOST>
  void take(int count, const float (*from)[NUM], const Vec* of_values) {
    IntVec most[MOST];
#pragma GCC unroll 4
    for (int r = 0; r < MOST; ++r) {
      most[r] = IntVec{};
#pragma GCC unroll 4
      for (int v = 0; r < count && v < VECTORS; ++v)
        most[r] = greater(most[r], magnitude_bits(load(from[r] + v * LANES) * of_values[v]));
    }
    const IntVec bits = greatests<MOST>(most);
    Vec peaks;
    std::memcpy(&peaks, &bits, sizeof peaks);
    float by[LANES];
    store(scales, peaks * (1.0f / MOST_WEIGHT));
    store(by, peaks > 1e-30f ? MOST_WEIGHT / peaks : Vec{});
    for (int r = 0; r < count; ++r) {
      __m512i levels[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        levels[v] = (__m512i)nearest(load(from[r] + v * LANES) * of_values[v] * broadcast(by[r]));
      split(levels, upper[r], lower[r]);
    }
  }

 private:
  // Packing goes quarter by quarter, which gives the order of lanes above.
  static void split(const __m512i* levels, uint8_t* upper, uint8_t* lower) {
    const __m512i a = _mm512_maskz_packus_epi32(ALL_WORDS, levels[0], levels[1]),
                  b = _mm512_maskz_packus_epi32(ALL_WORDS, levels[2], levels[3]), low = _mm512_set1_epi16(255);
    _mm512_store_si512(upper, _mm512_maskz_packus_epi16(ALL_BYTES, _mm512_maskz_srli_epi16(ALL_WORDS, a, 8),
                                                        _mm512_maskz_srli_epi16(ALL_WORDS, b, 8)));
    _mm512_store_si512(lower, _mm512_maskz_packus_epi16(ALL_BYTES, _mm512_and_si512(a, low), _mm512_and_si512(b, low)));
  }
};

#endif

}  // namespace sluice
