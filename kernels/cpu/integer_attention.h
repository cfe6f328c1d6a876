// The matrix products of attention in integers, over int8 keys and values, on processors with VNNI.
//
// A query's numbers are rounded to integers of 16 bits that share a scale, and the softmax weights of a block of keys
// to such of their own. Each is split into two bytes, which are multiplied by keys and values. LANES keys or values at
// a time are read, laid so that four bytes of each lane are multiplied at once, and meet the queries one by one, in
// registers. Sums are exact, so that their order changes no bit, and a query's result depends on no other query.
//
// A number is rounded by at most 1/65,000 of the greatest one; in the cache, by 1/254 of the greatest of its key or
// value.
#pragma once

#include "integer_weights.h"
#include "squares.h"

namespace sluice {

#if defined(__AVX512VNNI__)

// Adds the products of four unsigned and four signed bytes to each lane.
inline void add_products(IntVec& sum, __m512i a, __m512i b) { sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, a, b); }

// Keeps what was loaded in a register: the compiler would load it again for each product.
[[gnu::always_inline]] inline __m512i held(__m512i v) {
  asm("" : "+v"(v));
  return v;
}

inline __m512i broadcast_quad(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return held(_mm512_set1_epi32(four));
}

inline Vec to_floats(__m512i numbers) { return __builtin_convertvector((IntVec)numbers, Vec); }

// Multiplies sums of upper bytes by 256, before those of lower bytes are added. They may wrap around between.
[[gnu::always_inline]] inline void lift(IntVec (&sums)[4]) {
#pragma GCC unroll 4
  for (IntVec& one : sums) one = (IntVec)_mm512_maskz_slli_epi32(ALL, (__m512i)one, 8);
}

class ByIntegers {
 public:
  static constexpr int NUM = KEYS_OF<int8_t>;  // keys of a block

  // Rounds the queries of tiles. A query with a number that is not finite has a scale that is NaN.
  ByIntegers(const Attention<int8_t>& job, const QueryTile* tiles, int num) : dim_(job.dim) {
    for (int at = 0; at < num; ++at)
      for (int r = 0; r < tiles[at].count; ++r) rounded_[at].take(r, tiles[at].q[r], dim_, job.scale);
  }

  void begin(const KeyBlock<int8_t>&, int) {}

  // Computes the scores of queries [first, last) of tile `at`. Prefetches the keys of the next block.
  void score(const QueryTile&, int at, int first, int last, const KeyBlock<int8_t>& block, float (*scores)[NUM]) const {
    switch (dim_) {
      case 64: return score_keys<64>(rounded_[at], first, last, block, scores);
      case 128: return score_keys<128>(rounded_[at], first, last, block, scores);
      default: score_keys<0>(rounded_[at], first, last, block, scores);
    }
  }

  // acc [QUERIES, dim] += weights of queries [first, last) · values. Prefetches the values of the next block.
  void add_values(int first, int last, const KeyBlock<int8_t>& block, const float (*weights)[NUM], float* acc) const {
    acc += first * dim_, weights += first;
    switch (dim_) {
      case 64: return add_values<64>(last - first, block, weights, acc);
      case 128: return add_values<128>(last - first, block, weights, acc);
      default: add_values<0>(last - first, block, weights, acc);
    }
  }

 private:
  // Not inlined, so that no vectors are held in registers from one call to the next.
  template <int64_t DIM>
  [[gnu::noinline]] void score_keys(const RoundedQueries& own, int first, int last, const KeyBlock<int8_t>& block,
                                    float (*scores)[NUM]) const {
    const int64_t dim = DIM > 0 ? DIM : dim_;
    for (int from = 0; from < NUM; from += LANES) {
      const ByteRows<DIM> keys(block.keys + from, dim);
      const ByteRows<DIM> next(block.ahead->keys + from, dim);
      alignas(64) int32_t sums[QUERIES][LANES];  // over earlier chunks
#pragma GCC unroll 2
      for (int64_t d = 0; d < dim; d += CHUNK) {
        __m512i rows[LANES];
        Vec scales{};
        next.prefetch(d);
        keys.read(d, rows, scales);
        lay_keys(rows);
        for (int r = first; r < last; ++r) {
          const IntVec before = d > 0 ? load_ints(sums[r]) : (IntVec)_mm512_set1_epi32(own.starts[r]);
          const IntVec sum = before + multiplied(rows, own.numbers[r][d / CHUNK]);
          if (d + CHUNK < dim) store(sums[r], sum);
          else store(scores[r] + from, to_floats((__m512i)sum) * own.scales[r] * scales);
        }
      }
    }
  }

  // Transposes squares of four lanes in four rows: quarter q of vector 4 · k + i has the numbers from 16 · q + 4 · i on
  // of keys 4 · k, 4 · k + 1, …
  [[gnu::always_inline]] static void lay_keys(__m512i* rows) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(OFFSET));
#pragma GCC unroll 16
    for (int j = 0; j < LANES; ++j) rows[j] = _mm512_xor_si512(rows[j], offset);
#pragma GCC unroll 4
    for (__m512i* v = rows; v < rows + LANES; v += 4) transpose_four(v);
  }

  // Returns the products of LANES keys and a chunk of a query.
  [[gnu::always_inline]] static IntVec multiplied(const __m512i* keys, const int8_t (*numbers)[4][LINE]) {
    IntVec sums[4] = {IntVec{}, IntVec{}, IntVec{}, IntVec{}};  // each of four keys, four parts of a sum
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      if (part == 1) lift(sums);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i query = held(_mm512_load_si512(numbers[part][i]));
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) add_products(sums[k], keys[4 * k + i], query);
      }
    }
    const __m512i a = halves((__m512i)sums[0], (__m512i)sums[1]), b = halves((__m512i)sums[2], (__m512i)sums[3]);
    return (IntVec)_mm512_add_epi32(_mm512_maskz_shuffle_i32x4(ALL, a, b, 0x88),
                                    _mm512_maskz_shuffle_i32x4(ALL, a, b, 0xdd));
  }

  // Adds the upper halves of two vectors to their lower ones.
  [[gnu::always_inline]] static __m512i halves(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_maskz_shuffle_i32x4(ALL, a, b, 0x44), _mm512_maskz_shuffle_i32x4(ALL, a, b, 0xee));
  }

  template <int64_t DIM>
  [[gnu::noinline]] void add_values(int count, const KeyBlock<int8_t>& block, const float (*weights)[NUM],
                                    float* acc) const {
    const int64_t dim = DIM > 0 ? DIM : dim_;
    Vec scales[RoundedWeights::VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < RoundedWeights::VECTORS; ++v) scales[v] = ByteRows<DIM>(block.values + v * LANES, dim).scales();
    RoundedWeights rounded;
    if (count <= FEW) rounded.take<FEW>(count, weights, scales);
    else rounded.take<QUERIES>(count, weights, scales);
#pragma GCC unroll 2
    for (int64_t d = 0; d < dim; d += CHUNK) {
      alignas(64) int32_t sums[QUERIES][4][LANES];
      for (int from = 0; from < NUM; from += LANES) {
        ByteRows<DIM>(block.ahead->values + from, dim).prefetch(d);
        __m512i rows[LANES];
        ByteRows<DIM>(block.values + from, dim).read(d, rows);
        lay_values(rows);
        for (int r = 0; r < count; ++r)
          add(rows, rounded.upper[r] + from / 4, rounded.lower[r] + from / 4, from > 0, sums[r]);
      }
      for (int r = 0; r < count; ++r) add_scaled(sums[r], rounded.scales[r], dim - d, acc + r * dim + d);
    }
  }

  // Lays four rows side by side: lane 4 · q + j of vector 4 · k + i has number 16 · q + 4 · i + j of values 4 · k,
  // 4 · k + 1, …
  [[gnu::always_inline]] static void lay_values(__m512i* rows) {
#pragma GCC unroll 4
    for (__m512i* v = rows; v < rows + LANES; v += 4) {
      const __m512i low[2] = {_mm512_maskz_unpacklo_epi8(ALL_BYTES, v[0], v[1]),
                              _mm512_maskz_unpacklo_epi8(ALL_BYTES, v[2], v[3])};
      const __m512i high[2] = {_mm512_maskz_unpackhi_epi8(ALL_BYTES, v[0], v[1]),
                               _mm512_maskz_unpackhi_epi8(ALL_BYTES, v[2], v[3])};
      v[0] = _mm512_maskz_unpacklo_epi16(ALL_WORDS, low[0], low[1]);
      v[1] = _mm512_maskz_unpackhi_epi16(ALL_WORDS, low[0], low[1]);
      v[2] = _mm512_maskz_unpacklo_epi16(ALL_WORDS, high[0], high[1]);
      v[3] = _mm512_maskz_unpackhi_epi16(ALL_WORDS, high[0], high[1]);
    }
  }

  // Adds LANES values, times a query's weights, to `to`, or stores them there.
  [[gnu::always_inline]] static void add(const __m512i* values, const uint8_t* upper, const uint8_t* lower,
                                         bool is_more, int32_t (*to)[LANES]) {
    IntVec sums[4] = {IntVec{}, IntVec{}, IntVec{}, IntVec{}};
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      if (part == 1) lift(sums);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const __m512i weight = broadcast_quad((part == 0 ? upper : lower) + LANES * k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) add_products(sums[i], weight, values[4 * k + i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) store(to[i], is_more ? load_ints(to[i]) + sums[i] : sums[i]);
  }

  // to += sums · scale, for the first `num` numbers of a chunk.
  [[gnu::always_inline]] static void add_scaled(const int32_t (*sums)[LANES], float scale, int64_t num, float* to) {
    __m512i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = (__m512i)load_ints(sums[i]);
    turn_square(v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      if (i * LANES < num) store(to + i * LANES, load(to + i * LANES) + to_floats(v[i]) * scale);
  }

  // Transposes a square of quarters of vectors.
  [[gnu::always_inline]] static void turn_square(__m512i* v) {
    const __m512i a = _mm512_maskz_shuffle_i32x4(ALL, v[0], v[1], 0x44),
                  b = _mm512_maskz_shuffle_i32x4(ALL, v[2], v[3], 0x44);
    const __m512i c = _mm512_maskz_shuffle_i32x4(ALL, v[0], v[1], 0xee),
                  d = _mm512_maskz_shuffle_i32x4(ALL, v[2], v[3], 0xee);
    v[0] = _mm512_maskz_shuffle_i32x4(ALL, a, b, 0x88), v[1] = _mm512_maskz_shuffle_i32x4(ALL, a, b, 0xdd);
    v[2] = _mm512_maskz_shuffle_i32x4(ALL, c, d, 0x88), v[3] = _mm512_maskz_shuffle_i32x4(ALL, c, d, 0xdd);
  }

  static IntVec load_ints(const int32_t* from) {
    IntVec v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }

  int64_t dim_;
  RoundedQueries rounded_[MOST_TILES];
};

#endif

}  // namespace sluice
