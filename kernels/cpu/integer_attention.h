// The matrix products of attention in integers, over int8 keys and values, on processors with VNNI.
//
// A query's numbers are rounded to integers of 16 bits that share a scale, and the softmax weights of a block of keys
// to such of their own. Each is split into two bytes, which are multiplied by keys and values as these lie in the
// cache. Sums are exact, so that their order changes no bit, and a query's result depends on no other query.
//
// A number is rounded by at most 1/65,000 of the greatest one; in the cache, by 1/254 of the greatest of its key or
// value.
#pragma once

#include "queries.h"

namespace sluice {

#if defined(__AVX512VNNI__)

constexpr int64_t CHUNK = LINE;                // numbers of a head that a vector holds
constexpr int MOST_QUADS = MAX_DIM / 4;        // four numbers of one key, or of four values, fill a lane
constexpr int KEY_VECTORS = KEYS / LANES;      // a lane for each key
constexpr int KEY_QUADS = KEYS / 4;            // four keys, whose values are multiplied at once
constexpr int AT_ONCE = 3;                     // queries whose sums of a chunk of values the registers hold
constexpr float MOST_QUERY = 127 * 256 + 127;  // split into two signed bytes
constexpr float MOST_WEIGHT = 65535;           // split into two unsigned ones
constexpr int32_t OFFSET = 128;                // added to keys, since one factor is unsigned

static_assert(KEYS == 2 * LANES);

// Masks of all numbers: see ALL.
constexpr __mmask64 ALL_BYTES = ~0ull;
constexpr __mmask32 ALL_WORDS = ~0u;
constexpr __mmask8 ALL_PAIRS = 0xff;

// Adds the products of four unsigned and four signed bytes to each lane.
inline void add_products(IntVec& sum, __m512i a, __m512i b) { sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, a, b); }

inline __m512i broadcast_quad(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

// Returns upper · 256 + lower; the intermediate product may wrap around.
inline __m512i joined(IntVec upper, IntVec lower) {
  return _mm512_add_epi32(_mm512_maskz_slli_epi32(ALL, (__m512i)upper, 8), (__m512i)lower);
}

inline Vec to_floats(__m512i numbers) { return __builtin_convertvector((IntVec)numbers, Vec); }

// Returns the greatest magnitude of a row; NaN if one of the numbers is.
inline float greatest_magnitude(const float* x, int64_t num) {
  IntVec most{};
  for (int64_t i = 0; i < num; i += LANES) most = greater(most, magnitude_bits(load(x + i)));
  const int32_t bits = greatests<1>(&most)[0];
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

class ByIntegers {
 public:
  // Rounds the queries of tiles. A query with a number that is not finite has a scale that is NaN.
  ByIntegers(const Attention<int8_t>& job, const QueryTile* tiles, int num) : dim_(job.dim) {
    for (int at = 0; at < num; ++at)
      for (int r = 0; r < tiles[at].count; ++r) rounded_[at].take(r, tiles[at].q[r], dim_, job.scale);
  }

  // Prepares a block: its keys here, its values when they are first used. Prefetches the keys of the next block.
  void begin(const KeyBlock<int8_t>& block, int) {
    for (int from = 0; from < KEYS; from += LANES)
      for (int64_t d = 0; d < dim_; d += CHUNK) turn(block, from, d, turned_[d / 4] + from * 4);
    is_laid_ = false;
  }

  // Computes the scores of queries [first, last) of tile `at`, without the scales of keys.
  void score(const QueryTile&, int at, int first, int last, const KeyBlock<int8_t>&, float (*scores)[KEYS]) const {
    const Rounded& own = rounded_[at];
    for (int r = first; r < last; r += 4) switch (last - r) {
        case 1: score_rows<1>(own, r, scores + r); break;
        case 2: score_rows<2>(own, r, scores + r); break;
        case 3: score_rows<3>(own, r, scores + r); break;
        default: score_rows<4>(own, r, scores + r);
      }
  }

  // acc [QUERIES, dim] += weights of queries [first, last) · values.
  void add_values(int first, int last, const KeyBlock<int8_t>& block, const float (*weights)[KEYS], float* acc) {
    if (!is_laid_) lay(block);
    const int count = last - first;
    Weights rounded;
    if (count <= FEW) rounded.take<FEW>(count, weights + first);
    else rounded.take<QUERIES>(count, weights + first);
    acc += first * dim_;
    for (int64_t d = 0; d < dim_; d += CHUNK)
      for (int r = 0; r < count; r += AT_ONCE) switch (count - r) {
          case 1: add_rows<1>(r, rounded, laid_[d / CHUNK], d, acc); break;
          case 2: add_rows<2>(r, rounded, laid_[d / CHUNK], d, acc); break;
          default: add_rows<AT_ONCE>(r, rounded, laid_[d / CHUNK], d, acc);
        }
  }

 private:
  // The queries of a tile, rounded to 16 bits.
  struct Rounded {
    float scales[QUERIES];
    int32_t starts[QUERIES];                           // what the offset of keys adds, negative
    alignas(64) uint8_t numbers[QUERIES][2][MAX_DIM];  // upper bytes, lower bytes

    void take(int r, const float* q, int64_t dim, float scale) {
      const float peak = greatest_magnitude(q, dim), by = peak > 1e-30f ? MOST_QUERY / peak : 0.0f;
      IntVec total{};
      for (int64_t d = 0; d < dim; d += LANES) {
        const IntVec levels = nearest(load(q + d) * by), upper = (levels + 128) >> 8;
        total += levels;
        store(reinterpret_cast<int8_t*>(numbers[r][0] + d), upper);
        store(reinterpret_cast<int8_t*>(numbers[r][1] + d), levels);
      }
      scales[r] = (peak + peak * 0.0f) / MOST_QUERY * scale;  // NaN if the peak is infinite
      starts[r] = -OFFSET * sums<1>(&total)[0];
    }
  };

  // The softmax weights of queries in a block of keys, rounded to 16 bits.
  struct Weights {
    uint8_t upper[QUERIES][KEYS], lower[QUERIES][KEYS];
    float scales[LANES];  // NaN if a weight is

    // Rounds the weights of up to NUM queries.
    template <int NUM>
    void take(int count, const float (*from)[KEYS]) {
      IntVec most[NUM];
      for (int r = 0; r < NUM; ++r) {
        most[r] = IntVec{};
        for (int j = 0; r < count && j < KEYS; j += LANES)
          most[r] = greater(most[r], magnitude_bits(load(from[r] + j)));
      }
      const IntVec bits = greatests<NUM>(most);
      Vec peaks;
      std::memcpy(&peaks, &bits, sizeof peaks);
      float by[LANES];
      store(scales, peaks * (1.0f / MOST_WEIGHT));
      store(by, peaks > 1e-30f ? MOST_WEIGHT / peaks : Vec{});
      for (int r = 0; r < count; ++r)
        for (int j = 0; j < KEYS; j += LANES) {
          const IntVec levels = nearest(load(from[r] + j) * by[r]);
          store(reinterpret_cast<int8_t*>(upper[r] + j), levels >> 8);
          store(reinterpret_cast<int8_t*>(lower[r] + j), levels);
        }
    }
  };

  // Lays all values of a block, and prefetches those of the next one.
  void lay(const KeyBlock<int8_t>& block) {
    for (int64_t d = 0; d < dim_; d += CHUNK)
      for (int quad = 0; quad < KEY_QUADS; ++quad) lay(block, quad * 4, d, laid_[d / CHUNK][quad]);
    is_laid_ = true;
  }

  // Returns which of the numbers of a key or value lie in the chunk at `d`.
  __mmask64 chunk(int64_t d) const { return d + CHUNK <= dim_ ? ~0ull : (1ull << (dim_ - d)) - 1; }

  // Transposes a chunk of LANES keys: each vector of `to`, KEYS lanes apart, has four numbers of each key.
  void turn(const KeyBlock<int8_t>& block, int from, int64_t d, uint8_t* to) const {
    const __mmask64 within = chunk(d);
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(OFFSET));
    __m512i v[4][4];  // four keys, of which a vector has four numbers in each quarter
    for (int j = 0; j < LANES; ++j) {
      fetch(block.ahead->keys[from + j], d, dim_);
      v[j % 4][j / 4] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(within, block.keys[from + j] + d), offset);
    }
    for (int four = 0; four < 4; ++four) turn_quarters(v[0][four], v[1][four], v[2][four], v[3][four]);
    for (int i = 0; i < 4; ++i) {
      turn_square(v[i]);
      for (int quarter = 0; quarter < 4; ++quarter)
        _mm512_store_si512(to + (quarter * 4 + i) * KEYS * 4, v[i][quarter]);
    }
  }

  // Not inlined, so that no vectors are held in registers from one call to the next.
  template <int ROWS>
  [[gnu::noinline]] void score_rows(const Rounded& own, int first, float (*scores)[KEYS]) const {
    IntVec upper[ROWS][KEY_VECTORS] = {}, lower[ROWS][KEY_VECTORS];
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < KEY_VECTORS; ++v) lower[r][v] = (IntVec)_mm512_set1_epi32(own.starts[first + r]);
    for (int64_t d = 0; d < dim_; d += 4) {
      __m512i keys[KEY_VECTORS];
      for (int v = 0; v < KEY_VECTORS; ++v) keys[v] = _mm512_load_si512(turned_[d / 4] + v * LINE);
      for (int r = 0; r < ROWS; ++r) {
        const __m512i high = broadcast_quad(own.numbers[first + r][0] + d),
                      low = broadcast_quad(own.numbers[first + r][1] + d);
        for (int v = 0; v < KEY_VECTORS; ++v) {
          add_products(upper[r][v], keys[v], high);
          add_products(lower[r][v], keys[v], low);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < KEY_VECTORS; ++v)
        store(scores[r] + v * LANES, to_floats(joined(upper[r][v], lower[r][v])) * own.scales[first + r]);
  }

  // Lays a chunk of four values side by side: lane 4 · i + j of vector v has their numbers 16 · i + 4 · v + j.
  void lay(const KeyBlock<int8_t>& block, int from, int64_t d, uint8_t (*to)[LINE]) const {
    const __mmask64 within = chunk(d);
    __m512i row[4];
    for (int j = 0; j < 4; ++j) {
      fetch(block.ahead->values[from + j], d, dim_);
      row[j] = _mm512_maskz_loadu_epi8(within, block.values[from + j] + d);
    }
    const __m512i begin[2] = {_mm512_maskz_unpacklo_epi8(ALL_BYTES, row[0], row[1]),
                              _mm512_maskz_unpacklo_epi8(ALL_BYTES, row[2], row[3])};
    const __m512i end[2] = {_mm512_maskz_unpackhi_epi8(ALL_BYTES, row[0], row[1]),
                            _mm512_maskz_unpackhi_epi8(ALL_BYTES, row[2], row[3])};
    _mm512_store_si512(to[0], _mm512_maskz_unpacklo_epi16(ALL_WORDS, begin[0], begin[1]));
    _mm512_store_si512(to[1], _mm512_maskz_unpackhi_epi16(ALL_WORDS, begin[0], begin[1]));
    _mm512_store_si512(to[2], _mm512_maskz_unpacklo_epi16(ALL_WORDS, end[0], end[1]));
    _mm512_store_si512(to[3], _mm512_maskz_unpackhi_epi16(ALL_WORDS, end[0], end[1]));
  }

  template <int ROWS>
  [[gnu::noinline]] void add_rows(int first, const Weights& weights, const uint8_t (*laid)[4][LINE], int64_t d,
                                  float* acc) const {
    IntVec upper[ROWS][4] = {}, lower[ROWS][4] = {};
    for (int quad = 0; quad < KEY_QUADS; ++quad) {
      for (int r = 0; r < ROWS; ++r) {
        const __m512i high = broadcast_quad(weights.upper[first + r] + quad * 4),
                      low = broadcast_quad(weights.lower[first + r] + quad * 4);
        for (int v = 0; v < 4; ++v) {
          const __m512i values = _mm512_load_si512(laid[quad][v]);
          add_products(upper[r][v], high, values);
          add_products(lower[r][v], low, values);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      __m512i sums[4];
      for (int v = 0; v < 4; ++v) sums[v] = joined(upper[r][v], lower[r][v]);
      turn_square(sums);
      float* to = acc + (first + r) * dim_ + d;
      for (int v = 0; v < 4 && d + v * LANES < dim_; ++v)
        store(to + v * LANES, load(to + v * LANES) + to_floats(sums[v]) * weights.scales[first + r]);
    }
  }

  // Transposes a square of four lanes in each quarter of four vectors.
  static void turn_quarters(__m512i& a, __m512i& b, __m512i& c, __m512i& d) {
    const __m512i low[2] = {_mm512_maskz_unpacklo_epi32(ALL, a, b), _mm512_maskz_unpacklo_epi32(ALL, c, d)};
    const __m512i high[2] = {_mm512_maskz_unpackhi_epi32(ALL, a, b), _mm512_maskz_unpackhi_epi32(ALL, c, d)};
    a = _mm512_maskz_unpacklo_epi64(ALL_PAIRS, low[0], low[1]),
    b = _mm512_maskz_unpackhi_epi64(ALL_PAIRS, low[0], low[1]);
    c = _mm512_maskz_unpacklo_epi64(ALL_PAIRS, high[0], high[1]),
    d = _mm512_maskz_unpackhi_epi64(ALL_PAIRS, high[0], high[1]);
  }

  // Transposes a square of quarters of vectors.
  static void turn_square(__m512i* v) {
    const __m512i a = _mm512_maskz_shuffle_i32x4(ALL, v[0], v[1], 0x44),
                  b = _mm512_maskz_shuffle_i32x4(ALL, v[2], v[3], 0x44);
    const __m512i c = _mm512_maskz_shuffle_i32x4(ALL, v[0], v[1], 0xee),
                  d = _mm512_maskz_shuffle_i32x4(ALL, v[2], v[3], 0xee);
    v[0] = _mm512_maskz_shuffle_i32x4(ALL, a, b, 0x88), v[1] = _mm512_maskz_shuffle_i32x4(ALL, a, b, 0xdd);
    v[2] = _mm512_maskz_shuffle_i32x4(ALL, c, d, 0x88), v[3] = _mm512_maskz_shuffle_i32x4(ALL, c, d, 0xdd);
  }

  int64_t dim_;
  bool is_laid_ = false;
  alignas(64) uint8_t turned_[MOST_QUADS][KEYS * 4];               // keys: by four numbers, those of each
  alignas(64) uint8_t laid_[MAX_DIM / CHUNK][KEY_QUADS][4][LINE];  // values: see `lay`
  Rounded rounded_[MOST_TILES];
};

#endif

}  // namespace sluice
