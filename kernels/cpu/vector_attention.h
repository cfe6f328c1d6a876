// The matrix products of attention in float32 vectors, for each number format of the cache.
//
// Each score is one sum in one fixed order. Few queries read keys and values from the cache; for many queries the keys
// of a block are transposed first, and numbers of fewer bits are widened. Both ways give the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "queries.h"

namespace sluice {

constexpr int SHARING = 4;                    // query rows that share a load of values
constexpr int WIDEST = LANES == 16 ? 8 : 4;   // vectors of values in registers for one or two rows; half for more rows
constexpr int PAIR = 2;                       // query rows that share a load of keys
constexpr int ABREAST = LANES == 16 ? 4 : 2;  // query rows that share a load of transposed keys
constexpr int TURNING = 6;                    // the fewest queries for which transposing the keys first is faster

// Computes the scores of ROWS queries, a power of two, and prefetches the rows `ahead`. Each score is a dot product in
// LANES chains, which `sums` adds; one call of `sums` takes LANES keys of one query, or LANES / ROWS keys of each.
template <int ROWS, typename Element>
inline void score_keys(const float* const* q, const KeyBlock<Element>& block, const Element* const* ahead, int64_t dim,
                       float scale, float (*scores)[KEYS]) {
  constexpr int WIDTH = LANES / ROWS;
  for (int from = 0; from < KEYS; from += WIDTH) {
    Vec acc[LANES] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec query[ROWS];
      for (int r = 0; r < ROWS; ++r) query[r] = load(q[r] + d);
      for (int j = 0; j < WIDTH; ++j) {
        const Vec key = load(block.keys[from + j] + d);
        fetch(ahead[from + j], d, dim);
        for (int r = 0; r < ROWS; ++r) acc[r * WIDTH + j] += query[r] * key;
      }
    }
    const Vec scaled = sums(acc) * scale;
    float each[LANES];
    store(each, scaled);
    for (int r = 0; r < ROWS; ++r) std::copy(each + r * WIDTH, each + (r + 1) * WIDTH, scores[r] + from);
  }
}

// Transposes the keys of a block: turned [dim, KEYS].
template <typename Element>
inline void turn(const KeyBlock<Element>& block, int64_t dim, float* turned) {
  for (int from = 0; from < KEYS; from += LANES)
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec v[LANES];
      for (int j = 0; j < LANES; ++j) v[j] = load(block.keys[from + j] + d);
      transpose(v);
      for (int i = 0; i < LANES; ++i) store(turned + (d + i) * KEYS + from, v[i]);
    }
}

// Multiplies ROWS queries by two vectors of transposed keys: LANES chains, which are added in the order of `sums`, so
// that the result equals that of `score_keys` to the bit. Computes the sum of chains lane, lane + STEP, …
template <int ROWS, int STEP = 1>
[[gnu::always_inline]] inline void multiply_turned(const float* const* q, const float* turned, int64_t dim, int lane,
                                                   Vec (*to)[2]) {
  if constexpr (STEP == LANES) {
    for (int r = 0; r < ROWS; ++r) to[r][0] = to[r][1] = Vec{};
    for (int64_t d = lane; d < dim; d += LANES) {
      const Vec one = load(turned + d * KEYS), other = load(turned + d * KEYS + LANES);
      for (int r = 0; r < ROWS; ++r) {
        const Vec query = broadcast(q[r][d]);
        to[r][0] += query * one;
        to[r][1] += query * other;
      }
    }
  } else {
    Vec others[ROWS][2];
    multiply_turned<ROWS, 2 * STEP>(q, turned, dim, lane, to);
    multiply_turned<ROWS, 2 * STEP>(q, turned, dim, lane + STEP, others);
    for (int r = 0; r < ROWS; ++r) to[r][0] += others[r][0], to[r][1] += others[r][1];
  }
}

template <int ROWS>
inline void score_turned(const float* const* q, const float* turned, int64_t dim, float scale, float (*scores)[KEYS]) {
  for (int from = 0; from < KEYS; from += 2 * LANES) {
    Vec found[ROWS][2];
    multiply_turned<ROWS>(q, turned + from, dim, 0, found);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < 2; ++v) store(scores[r] + from + v * LANES, found[r][v] * scale);
  }
}

// acc [COUNT, dim] += weights · values, for the WIDE vectors from `d` on. The order of keys does not depend on COUNT.
// Calls fetch_next(j, at) for the numbers that it reads of each value.
template <int COUNT, int WIDE, typename Element, typename FetchNext>
inline void add_vectors(const Element* const* values, int num, int64_t dim, int64_t d, const float (*weights)[KEYS],
                        float* acc, const FetchNext& fetch_next) {
  Vec sums[COUNT][WIDE];
  for (int r = 0; r < COUNT; ++r)
    for (int v = 0; v < WIDE; ++v) sums[r][v] = load(acc + r * dim + d + v * LANES);
  for (int j = 0; j < num; ++j) {
    Vec value[WIDE];
    for (int v = 0; v < WIDE; ++v) {
      value[v] = load(values[j] + d + v * LANES);
      fetch_next(j, d + v * LANES);
    }
    for (int r = 0; r < COUNT; ++r) {
      const Vec weight = broadcast(weights[r][j]);
      for (int v = 0; v < WIDE; ++v) sums[r][v] += weight * value[v];
    }
  }
  for (int r = 0; r < COUNT; ++r)
    for (int v = 0; v < WIDE; ++v) store(acc + r * dim + d + v * LANES, sums[r][v]);
}

// acc [COUNT, dim] += weights · values, from `d` to the end.
template <int COUNT, int WIDE, typename Element, typename FetchNext>
inline void add_values(const Element* const* values, int num, int64_t dim, int64_t d, const float (*weights)[KEYS],
                       float* acc, const FetchNext& fetch_next) {
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
    add_vectors<COUNT, WIDE>(values, num, dim, d, weights, acc, fetch_next);
  if constexpr (WIDE > 1) add_values<COUNT, WIDE / 2>(values, num, dim, d, weights, acc, fetch_next);
}

template <typename Element, typename FetchNext>
inline void add_values(int count, const Element* const* values, int num, int64_t dim, const float (*weights)[KEYS],
                       float* acc, const FetchNext& fetch_next) {
  const auto add = [&]<int COUNT, int WIDE>(int r) {
    add_values<COUNT, WIDE>(values, num, dim, 0, weights + r, acc + r * dim, fetch_next);
  };
  for (int r = 0; r < count; r += SHARING) switch (count - r) {
      case 1: add.template operator()<1, WIDEST>(r); break;
      case 2: add.template operator()<2, WIDEST>(r); break;
      case 3: add.template operator()<3, WIDEST / 2>(r); break;
      default: add.template operator()<SHARING, WIDEST / 2>(r);
    }
}

// The scales of a block's keys or values, in formats that have scales. They are collected some time before they are
// used, as a vector cannot be read while its numbers are still being written; and after the keys or values have been
// prefetched, since the scales lie behind them.
template <typename Element>
struct Scales {
  float by[KEYS];

  void collect(const Element* const* from, int64_t dim) {
#pragma GCC unroll 8
    for (int j = 0; j < KEYS; ++j) by[j] = scale_of(from[j], dim);
  }

  // Multiplies the scores or weights of `count` queries.
  void apply(int count, float (*scores)[KEYS]) const {
    for (int r = 0; r < count; ++r)
      for (int j = 0; j < KEYS; j += LANES) store(scores[r] + j, load(scores[r] + j) * load(by + j));
  }
};

template <typename Element>
  requires(!IS_SCALED<Element>)
struct Scales<Element> {
  void collect(const Element* const*, int64_t) {}
  void apply(int, float (*)[KEYS]) const {}
};

template <typename Element>
class ByVectors {
 public:
  static_assert(KEYS_OF<Element> == KEYS);

  explicit ByVectors(const Attention<Element>& job) : dim_(job.dim), scale_(job.scale) {}

  // Prepares a block that so many queries meet, of whatever tile.
  void begin(const KeyBlock<Element>& block, int rows) {
    of_keys_.collect(block.keys, dim_), of_values_.collect(block.values, dim_);
    is_turned_ = rows >= TURNING;
    if (!is_turned_) return;
    turn(block, dim_, turned_);
    if constexpr (!std::is_same_v<Element, float>)
      for (int j = 0; j < KEYS; ++j) {
        wide_[j] = values_ + j * dim_;
        for (int64_t d = 0; d < dim_; d += LANES) store(values_ + j * dim_ + d, load(block.values[j] + d));
      }
  }

  // Computes the scores of queries [first, last) of a tile.
  void score(const QueryTile& tile, int, int first, int last, const KeyBlock<Element>& block,
             float (*scores)[KEYS]) const {
    int r = first;
    if (is_turned_) {
      for (; r + ABREAST <= last; r += ABREAST) score_turned<ABREAST>(tile.q + r, turned_, dim_, scale_, scores + r);
      for (; r < last; ++r) score_turned<1>(tile.q + r, turned_, dim_, scale_, scores + r);
    } else {
      const Element* const* ahead = is_near() ? block.values : block.ahead->keys;
      for (; r + PAIR <= last; r += PAIR) score_keys<PAIR>(tile.q + r, block, ahead, dim_, scale_, scores + r);
      for (; r < last; ++r) score_keys<1>(tile.q + r, block, ahead, dim_, scale_, scores + r);
    }
    of_keys_.apply(last - first, scores + first);
  }

  // acc [QUERIES, dim] += weights of queries [first, last) · values; multiplies the weights by the scales of values.
  // Prefetches the keys or values of the next block.
  void add_values(int first, int last, const KeyBlock<Element>& block, float (*weights)[KEYS], float* acc) const {
    of_values_.apply(last - first, weights + first);
    const Element* const* ahead = is_near() ? block.ahead->keys : block.ahead->values;
    const auto fetch_next = [&](int j, int64_t at) { fetch(ahead[j], at, dim_); };
    const auto add = [&](const auto* const* values) {
      sluice::add_values(last - first, values, block.num, dim_, weights + first, acc + first * dim_, fetch_next);
    };
    if constexpr (!std::is_same_v<Element, float>)
      if (is_turned_) return add(wide_);
    add(block.values);
  }

 private:
  // Whether values are prefetched during the scores of their own block, and keys during the values of the block before.
  // Short rows come too late by that, and both are prefetched during those of the block before. The L1 cache would not
  // hold two blocks of longer rows.
  bool is_near() const { return is_turned_ || dim_ * sizeof(Element) > 2 * LINE; }

  int64_t dim_;
  float scale_;
  bool is_turned_ = false;
  Scales<Element> of_keys_, of_values_;
  alignas(64) float turned_[MAX_DIM * KEYS];  // [dim, KEYS] keys
  const float* wide_[KEYS];                   // values, widened if they have fewer bits
  alignas(64) float values_[std::is_same_v<Element, float> ? LANES : KEYS * MAX_DIM];
};

}  // namespace sluice
