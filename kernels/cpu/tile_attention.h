// The matrix products of attention in AMX tiles, over bfloat16 keys and values. Queries and softmax weights are
// rounded to bfloat16 too.
//
// Scores are computed as [keys, queries], since keys lie in the cache as rows of a tile; values are interleaved in
// pairs. A query's result depends on no other query, as rows and columns of tiles are independent.
#pragma once

#include "bfloat16.h"
#include "queries.h"
#include "tiles.h"

namespace sluice {

#if defined(__AMX_BF16__)

static_assert(KEYS == BLOCK && QUERIES == TILE_ROWS && LANES == TILE_ROWS);

class ByTiles {
 public:
  // Whether heads are whole cache lines.
  static bool takes(int64_t dim) { return dim % NUMBERS == 0; }

  ByTiles(const Attention<uint16_t>& job, const QueryTile& tile)
      : dim_(job.dim), scale_(job.scale), token_(job.cache.token), tiles_(shape(tile.count)) {
    for (int64_t d = 0; d < dim_; d += NUMBERS) {
      Vec words[LANES] = {};
      for (int r = 0; r < tile.count; ++r) words[r] = rounded(tile.q[r] + d, tile.q[r] + d + LANES);
      transpose(words);
      for (int i = 0; i < LANES; ++i) store(queries_ + (d / 2 + i) * LANES, words[i]);
    }
  }

  void begin(const KeyBlock<uint16_t>&, int) {}

  // Computes the scores of queries [first, last) of the only tile and prefetches the values.
  void score(const QueryTile&, int, int first, int last, const KeyBlock<uint16_t>& block, float (*scores)[KEYS]) {
    const KeyRows lower = rows(block.keys), upper = rows(block.keys + TILE_ROWS);
    clear_tile<SCORES>(), clear_tile<SCORES + 1>();
    for (int64_t d = 0; d < dim_; d += NUMBERS) {
      for (int j = 0; j < KEYS; ++j) __builtin_prefetch(block.values[j] + d);
      load_tile<QUERY>(queries_ + d / 2 * LANES, LINE);
      load_tile<KEY>(lower.first + d, lower.stride), BFloat16s::add<SCORES, KEY, QUERY>();
      load_tile<KEY>(upper.first + d, upper.stride), BFloat16s::add<SCORES + 1, KEY, QUERY>();
    }
    alignas(64) float found[KEYS * LANES];
    store_tile<SCORES>(found, LINE), store_tile<SCORES + 1>(found + TILE_ROWS * LANES, LINE);
    for (int from = 0; from < KEYS; from += LANES) {
      Vec v[LANES];
      for (int j = 0; j < LANES; ++j) v[j] = load(found + (from + j) * LANES);
      transpose(v);
      for (int r = first; r < last; ++r) store(scores[r] + from, v[r] * scale_);
    }
  }

  // acc [QUERIES, dim] += weights of queries [first, last) · values. Prefetches the keys of the next block.
  void add_values(int first, int last, const KeyBlock<uint16_t>& block, const float (*weights)[KEYS], float* acc) {
    alignas(64) float narrow[QUERIES * LANES] = {};
    for (int r = first; r < last; ++r) store(narrow + r * LANES, rounded(weights[r], weights[r] + LANES));
    for (int j = 0; j < KEYS; j += 2) interleave(block.values[j], block.values[j + 1], dim_, values_ + j * dim_);
    load_tile<WEIGHT>(narrow, LINE);
    for (int64_t d = 0; d < dim_; d += NUMBERS) {
      for (int j = 0; j < KEYS; ++j) __builtin_prefetch(block.ahead->keys[j] + d);
      add<0>(acc, d), add<1>(acc, d + LANES);
    }
  }

 private:
  static constexpr int WEIGHT = 2, VALUE = 3, SCORES = 4, KEY = 6, QUERY = 7;  // tiles; 0 and 1 hold sums of values

  struct KeyRows {
    const uint16_t* first;
    int64_t stride;  // bytes
  };

  static std::array<int, 8> shape(int count) {
    return {count, count, count, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};
  }

  // Returns the keys as rows of a tile; copies them side by side unless they lie at a constant stride.
  KeyRows rows(const uint16_t* const* keys) {
    bool is_even = true;
    for (int j = 1; j < TILE_ROWS; ++j) is_even &= keys[j] - keys[j - 1] == token_;
    if (is_even) return {keys[0], token_ * 2};
    uint16_t* to = keys_ + (laid_ ^= 1) * TILE_ROWS * dim_;
    for (int j = 0; j < TILE_ROWS; ++j) std::memcpy(to + j * dim_, keys[j], dim_ * sizeof(uint16_t));
    return {to, dim_ * 2};
  }

  // Adds weights · values for the LANES columns from `d` on.
  template <int SUM>
  void add(float* acc, int64_t d) const {
    load_tile<SUM>(acc + d, dim_ * 4), load_tile<VALUE>(values_ + d * 2, dim_ * 4);
    BFloat16s::add<SUM, WEIGHT, VALUE>();
    store_tile<SUM>(acc + d, dim_ * 4);
  }

  int64_t dim_;
  float scale_;
  int64_t token_;
  int laid_ = 0;
  Tiles tiles_;
  alignas(64) float queries_[MAX_DIM / 2 * LANES];      // [dim / 2, QUERIES] pairs of bfloat16
  alignas(64) uint16_t keys_[2 * TILE_ROWS * MAX_DIM];  // copies of the keys of two tiles, if `rows` made them
  alignas(64) uint16_t values_[KEYS * MAX_DIM];         // [KEYS / 2, dim, 2]
};

#endif

}  // namespace sluice
