// The matrix products of attention over bfloat16 keys and values by pairs of numbers, on processors with AVX-512 BF16
// and no AMX. Queries and softmax weights are rounded to bfloat16 too.
//
// Each score is the sum of four chains in one fixed order: chain q goes over pairs 4 · q, …, 4 · q + 3 of each LANES
// pairs. Few queries read four keys at a time from the cache and transpose squares of them; for many queries the keys
// of a block are transposed as a whole first, and its values interleaved. Both ways give the same bits.
#pragma once

#include "ahead.h"
#include "bfloat16.h"
#include "squares.h"

namespace sluice {

#if defined(__AVX512BF16__)

class ByPairs {
 public:
  static_assert(KEYS_OF<uint16_t> == KEYS && KEYS == NUMBERS && KEYS == 2 * LANES);

  // Whether heads are whole cache lines.
  static bool takes(int64_t dim) { return dim % NUMBERS == 0; }

  // Rounds the queries of tiles.
  ByPairs(const Attention<uint16_t>& job, const QueryTile* tiles, int num) : dim_(job.dim), scale_(job.scale) {
    for (int at = 0; at < num; ++at)
      for (int r = 0; r < tiles[at].count; ++r)
        for (int64_t d = 0; d < dim_; d += NUMBERS)
          put_line(queries_[at] + r * dim_ + d, rounded(tiles[at].q[r] + d, tiles[at].q[r] + d + LANES));
  }

  // Prepares a block that so many queries meet, of whatever tile.
  void begin(const KeyBlock<uint16_t>& block, int rows) {
    is_laid_ = rows >= LAYING;
    if (!is_laid_) return;
    for (int from = 0; from < KEYS; from += LANES)
      for (int64_t d = 0; d < dim_; d += NUMBERS) {
        Vec v[LANES];
        for (int j = 0; j < LANES; ++j) {
          v[j] = (Vec)line(block.keys[from + j] + d);
          __builtin_prefetch(block.ahead->keys[from + j] + d, 0, 2);
        }
        transpose(v);
        for (int i = 0; i < LANES; ++i) put_line(keys_ + ((d / 2 + i) * KEYS + from) * 2, v[i]);
      }
    for (int j = 0; j < KEYS; j += 2) {
      for (int64_t d = 0; d < dim_; d += NUMBERS)
        for (int of = j; of < j + 2; ++of) __builtin_prefetch(block.ahead->values[of] + d, 0, 2);
      interleave(block.values[j], block.values[j + 1], dim_, values_ + j * dim_);
    }
  }

  // Computes the scores of queries [first, last) of tile `at`.
  void score(const QueryTile&, int at, int first, int last, const KeyBlock<uint16_t>& block,
             float (*scores)[KEYS]) const {
    for (int r = first; r < last; r += ABREAST) {
      const uint16_t* queries = queries_[at] + r * dim_;
      switch (last - r) {
        case 1: score_rows<1>(queries, block, scores + r); break;
        case 2: score_rows<2>(queries, block, scores + r); break;
        case 3: score_rows<3>(queries, block, scores + r); break;
        default: score_rows<ABREAST>(queries, block, scores + r);
      }
    }
  }

  // acc [QUERIES, dim] += weights of queries [first, last) · values.
  void add_values(int first, int last, const KeyBlock<uint16_t>& block, const float (*weights)[KEYS],
                  float* acc) const {
    alignas(64) uint16_t narrow[QUERIES][KEYS];
    for (int r = first; r < last; ++r) put_line(narrow[r], rounded(weights[r], weights[r] + LANES));
    for (int r = first; r < last; r += ABREAST) switch (last - r) {
        case 1: add_rows<1, WIDEST>(block, narrow + r, acc + r * dim_); break;
        case 2: add_rows<2, WIDEST>(block, narrow + r, acc + r * dim_); break;
        case 3: add_rows<3, WIDEST / 2>(block, narrow + r, acc + r * dim_); break;
        default: add_rows<ABREAST, WIDEST / 2>(block, narrow + r, acc + r * dim_);
      }
  }

 private:
  static constexpr int LAYING = 8;   // the fewest queries for which laying a block first is faster
  static constexpr int ABREAST = 4;  // query rows that share a load of keys or values
  static constexpr int WIDEST = 8;   // vectors of sums of one or two rows in registers; half for more rows

  static __m512i line(const uint16_t* from) { return _mm512_loadu_si512(from); }

  static void put_line(uint16_t* to, Vec v) { std::memcpy(to, &v, sizeof v); }

  // Prefetches the lines at `d` of NUM rows from j on, once `read` has arrived: a core loses some of the prefetches
  // that come all at once, and these are asked for as fast as memory gives.
  template <int NUM>
  [[gnu::always_inline]] static void fetch(const Ahead<uint16_t>& ahead, int j, int64_t d, __m512i read) {
    int64_t nothing;
    asm volatile("vmovd %x1, %k0\n\tand $0, %k0" : "=r"(nothing) : "v"(read) : "cc");
#pragma GCC unroll 4
    for (int of = j; of < j + NUM; ++of) {
      __builtin_prefetch(ahead.next[of] + d + nothing);
      __builtin_prefetch(ahead.later[of] + d + nothing, 0, 2);
    }
  }

  Lookahead<uint16_t> lookahead() const { return {dim_, false, true}; }

  template <int ROWS>
  void score_rows(const uint16_t* queries, const KeyBlock<uint16_t>& block, float (*scores)[KEYS]) const {
    if (is_laid_) return score_laid<ROWS>(queries, scores);
    switch (dim_) {
      case 64: return score_read<ROWS, 64>(queries, block, scores);
      case 128: return score_read<ROWS, 128>(queries, block, scores);
      default: score_read<ROWS, 0>(queries, block, scores);
    }
  }

  // Computes the scores of ROWS queries with keys in the cache, and prefetches. Not inlined, so that no vectors are
  // held in registers from one call to the next.
  template <int ROWS, int64_t DIM>
  [[gnu::noinline]] void score_read(const uint16_t* queries, const KeyBlock<uint16_t>& block,
                                    float (*scores)[KEYS]) const {
    const int64_t dim = DIM > 0 ? DIM : dim_;
    const Ahead<uint16_t> ahead = lookahead().before_values(block);
    for (int from = 0; from < KEYS; from += LANES) {
      Vec sums[4][ROWS];  // quarter q of sums[k] is that of chain q, of four keys
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        Vec own[ROWS][1];
        clear(own);
        const int first = from + 4 * k;
#pragma GCC unroll 4
        for (int64_t d = 0; d < dim; d += NUMBERS) {
          __m512i keys[4];
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) keys[j] = line(block.keys[first + j] + d);
          fetch<4>(ahead, first, d, keys[3]);
          transpose_four(keys);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) multiply_four(own[r][0], keys, line(queries + r * dim + d));
        }
        for (int r = 0; r < ROWS; ++r) sums[k][r] = own[r][0];
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Vec found = add_chains(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
        store(scores[r] + from, found * scale_);
      }
    }
  }

  // Adds the products of four transposed keys and a line of a query.
  [[gnu::always_inline]] static void multiply_four(Vec& sum, const __m512i* keys, __m512i query) {
    add_pairs(sum, keys[0], _mm512_maskz_shuffle_epi32(ALL, query, _MM_PERM_AAAA));
    add_pairs(sum, keys[1], _mm512_maskz_shuffle_epi32(ALL, query, _MM_PERM_BBBB));
    add_pairs(sum, keys[2], _mm512_maskz_shuffle_epi32(ALL, query, _MM_PERM_CCCC));
    add_pairs(sum, keys[3], _mm512_maskz_shuffle_epi32(ALL, query, _MM_PERM_DDDD));
  }

  // Adds chains 0 and 2, 1 and 3, and both sums, for four keys of each vector.
  [[gnu::always_inline]] static Vec add_chains(Vec a, Vec b, Vec c, Vec d) {
    const Vec lower = quarters<0x44>(a, b) + quarters<0xee>(a, b), upper = quarters<0x44>(c, d) + quarters<0xee>(c, d);
    return quarters<0x88>(lower, upper) + quarters<0xdd>(lower, upper);
  }

  template <int WHICH>
  [[gnu::always_inline]] static Vec quarters(Vec a, Vec b) {
    return (Vec)_mm512_maskz_shuffle_f32x4(ALL, (__m512)a, (__m512)b, WHICH);
  }

  // Computes the scores of ROWS queries with laid keys: first chains 0 and 2, then 1 and 3.
  template <int ROWS>
  [[gnu::noinline]] void score_laid(const uint16_t* queries, float (*scores)[KEYS]) const {
    Vec found[ROWS][2];
#pragma GCC unroll 2
    for (int chain = 0; chain < 2; ++chain) {
      Vec one[ROWS][2], other[ROWS][2];
      clear(one), clear(other);
      for (int64_t from = chain * 8; from < dim_; from += NUMBERS) {
#pragma GCC unroll 4
        for (int64_t d = from; d < from + 8; d += 2) {
          multiply_laid<ROWS>(queries + d, d, one);
          multiply_laid<ROWS>(queries + d + 16, d + 16, other);
        }
      }
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2; ++v) {
          const Vec both = one[r][v] + other[r][v];
          found[r][v] = chain == 0 ? both : found[r][v] + both;
        }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < 2; ++v) store(scores[r] + v * LANES, found[r][v] * scale_);
  }

  // Adds the products of numbers d and d + 1 of ROWS queries and of all keys.
  template <int ROWS>
  [[gnu::always_inline]] void multiply_laid(const uint16_t* queries, int64_t d, Vec (&sums)[ROWS][2]) const {
    const __m512i keys[2] = {line(keys_ + d * KEYS), line(keys_ + d * KEYS + NUMBERS)};
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const __m512i query = broadcast_pair(queries + r * dim_);
      for (int v = 0; v < 2; ++v) add_pairs(sums[r][v], keys[v], query);
    }
  }

  // acc [COUNT, dim] += weights · values; prefetches if these are read from the cache.
  template <int COUNT, int WIDE>
  void add_rows(const KeyBlock<uint16_t>& block, const uint16_t (*weights)[KEYS], float* acc) const {
    if (is_laid_)
      return add_vectors<COUNT, WIDE>(0, weights, acc, [&](int j, int64_t d, __m512i* values) {
        values[0] = line(values_ + j * dim_ + d * 2), values[1] = line(values_ + j * dim_ + d * 2 + NUMBERS);
      });
    const Ahead<uint16_t> ahead = lookahead().after_values(block);
    add_vectors<COUNT, WIDE>(0, weights, acc, [&](int j, int64_t d, __m512i* values) {
      const __m512i one = line(block.values[j] + d), other = line(block.values[j + 1] + d);
      fetch<2>(ahead, j, d, other);
      values[0] = interleaved(one, other, false), values[1] = interleaved(one, other, true);
    });
  }

  // Adds from `d` to the end, WIDE vectors at a time, while there are so many. read(j, d, to) gives NUMBERS numbers of
  // values j and j + 1 from d on, as pairs.
  template <int COUNT, int WIDE, typename Read>
  [[gnu::always_inline]] void add_vectors(int64_t d, const uint16_t (*weights)[KEYS], float* acc,
                                          const Read& read) const {
    for (; d + WIDE * LANES <= dim_; d += WIDE * LANES) {
      Vec sums[COUNT][WIDE];
      for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < WIDE; ++v) sums[r][v] = load(acc + r * dim_ + d + v * LANES);
      for (int j = 0; j < KEYS; j += 2) {
        __m512i values[WIDE];
        for (int v = 0; v < WIDE; v += 2) read(j, d + v * LANES, values + v);
        for (int r = 0; r < COUNT; ++r) {
          const __m512i weight = broadcast_pair(weights[r] + j);
          for (int v = 0; v < WIDE; ++v) add_pairs(sums[r][v], values[v], weight);
        }
      }
      for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < WIDE; ++v) store(acc + r * dim_ + d + v * LANES, sums[r][v]);
    }
    if constexpr (WIDE > 2) add_vectors<COUNT, WIDE / 2>(d, weights, acc, read);
  }

  int64_t dim_;
  float scale_;
  bool is_laid_ = false;
  alignas(64) uint16_t queries_[MOST_TILES][QUERIES * MAX_DIM];  // of tiles: [QUERIES, dim]
  alignas(64) uint16_t keys_[MAX_DIM * KEYS];                    // [dim / 2, KEYS, 2], if the block is laid
  alignas(64) uint16_t values_[KEYS * MAX_DIM];                  // [KEYS / 2, dim, 2], if the block is laid
};

#endif

}  // namespace sluice
