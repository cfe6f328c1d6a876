// The matrix products of attention in float32 vectors, for each number format of the cache.
//
// Each score is one sum in one fixed order. Few queries read keys and values from the cache; for many queries the keys
// of a block are transposed first, and numbers of fewer bits are widened. Both ways give the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ahead.h"

namespace sluice {

constexpr int SHARING = 4;                    // query rows that share a load of values
constexpr int WIDEST = LANES == 16 ? 8 : 4;   // vectors of values in registers for one or two rows; half for more rows
constexpr int PAIR = 2;                       // query rows that share a load of keys
constexpr int ABREAST = LANES == 16 ? 4 : 2;  // query rows that share a load of transposed keys
constexpr int RESIDENT = 16;                  // vectors of queries in registers while keys are read one by one
constexpr int TURNING = 6;                    // the fewest queries for which transposing the keys first is faster

// The head size of which queries stay in registers while keys are read one after the other; 0: none. Keys of four cache
// lines are read faster some of them abreast.
template <typename Element>
constexpr int HELD_DIM = 0;
#if defined(__AVX512F__)
template <>
constexpr int HELD_DIM<float> = 128;
template <>
constexpr int HELD_DIM<uint16_t> = 64;
#endif

// Computes the scores of ROWS queries, a power of two, and prefetches the rows `ahead`. Each score is a dot product in
// LANES chains, which `sums` adds; one call of `sums` takes LANES keys of one query, or LANES / ROWS keys of each.
template <int ROWS, typename Element>
inline void score_keys(const float* const* q, const KeyBlock<Element>& block, const Ahead<Element>& ahead, int64_t dim,
                       float scale, float (*scores)[KEYS]) {
  constexpr int WIDTH = LANES / ROWS;
  for (int from = 0; from < KEYS; from += WIDTH) {
    Vec acc[LANES] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec query[ROWS];
      for (int r = 0; r < ROWS; ++r) query[r] = load(q[r] + d);
      for (int j = 0; j < WIDTH; ++j) {
        const Vec key = load(block.keys[from + j] + d);
        ahead.fetch(from + j, d, dim);
        for (int r = 0; r < ROWS; ++r) acc[r * WIDTH + j] += query[r] * key;
      }
    }
    const Vec scaled = sums(acc) * scale;
    float each[LANES];
    store(each, scaled);
    for (int r = 0; r < ROWS; ++r) std::copy(each + r * WIDTH, each + (r + 1) * WIDTH, scores[r] + from);
  }
}

// Computes the same of ROWS queries of DIM numbers, which stay in registers; any number of queries.
template <int ROWS, int DIM, typename Element>
[[gnu::noinline]] void score_held(const float* const* q, const KeyBlock<Element>& block, const Ahead<Element>& ahead,
                                  float scale, float (*scores)[KEYS]) {
  constexpr int NUM = DIM / LANES;
  Vec query[ROWS][NUM];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < NUM; ++i) query[r][i] = load(q[r] + i * LANES);
  for (int from = 0; from < KEYS; from += LANES) {
    alignas(64) float chains[ROWS][LANES][LANES];
    for (int j = 0; j < LANES; ++j) {
      Vec acc[ROWS] = {};
      const Element* key = block.keys[from + j];
#pragma GCC unroll 8
      for (int i = 0; i < NUM; ++i) {
        ahead.fetch(from + j, i * LANES, DIM);
        const Vec part = load(key + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) acc[r] += query[r][i] * part;
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) store(chains[r][j], acc[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      Vec v[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; ++j) v[j] = load(chains[r][j]);
      store(scores[r] + from, sums(v) * scale);
    }
  }
}

// Computes the scores of queries [first, last), at most ROWS of them at a time.
template <int ROWS, int DIM, typename Element>
inline void score_held(const float* const* q, int first, int last, const KeyBlock<Element>& block,
                       const Ahead<Element>& ahead, float scale, float (*scores)[KEYS]) {
  for (; first + ROWS <= last; first += ROWS) score_held<ROWS, DIM>(q + first, block, ahead, scale, scores + first);
  if constexpr (ROWS > 1)
    if (first < last) score_held<ROWS - 1, DIM>(q, first, last, block, ahead, scale, scores);
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
// Prefetches as many rows of `ahead` as there are values.
template <int COUNT, int WIDE, typename Element, typename Cached>
inline void add_vectors(const Element* const* values, int num, int64_t dim, int64_t d, const float (*weights)[KEYS],
                        float* acc, const Ahead<Cached>& ahead) {
  Vec sums[COUNT][WIDE];
  for (int r = 0; r < COUNT; ++r)
    for (int v = 0; v < WIDE; ++v) sums[r][v] = load(acc + r * dim + d + v * LANES);
  for (int j = 0; j < num; ++j) {
    Vec value[WIDE];
    for (int v = 0; v < WIDE; ++v) {
      value[v] = load(values[j] + d + v * LANES);
      ahead.fetch(j, d + v * LANES, dim);
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
template <int COUNT, int WIDE, typename Element, typename Cached>
inline void add_values(const Element* const* values, int num, int64_t dim, int64_t d, const float (*weights)[KEYS],
                       float* acc, const Ahead<Cached>& ahead) {
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES) add_vectors<COUNT, WIDE>(values, num, dim, d, weights, acc, ahead);
  if constexpr (WIDE > 1) add_values<COUNT, WIDE / 2>(values, num, dim, d, weights, acc, ahead);
}

template <typename Element, typename Cached>
inline void add_values(int count, const Element* const* values, int num, int64_t dim, const float (*weights)[KEYS],
                       float* acc, const Ahead<Cached>& ahead) {
  const auto add = [&]<int COUNT, int WIDE>(int r) {
    add_values<COUNT, WIDE>(values, num, dim, 0, weights + r, acc + r * dim, ahead);
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
      const Ahead<Element> ahead = lookahead().before_values(block);
      if constexpr (HELD_DIM<Element> > 0)
        if (is_held()) {
          constexpr int ROWS = RESIDENT / (HELD_DIM<Element> / LANES);
          score_held<ROWS, HELD_DIM<Element>>(tile.q, first, last, block, ahead, scale_, scores);
          r = last;
        }
      for (; r + PAIR <= last; r += PAIR) score_keys<PAIR>(tile.q + r, block, ahead, dim_, scale_, scores + r);
      for (; r < last; ++r) score_keys<1>(tile.q + r, block, ahead, dim_, scale_, scores + r);
    }
    of_keys_.apply(last - first, scores + first);
  }

  // acc [QUERIES, dim] += weights of queries [first, last) · values; multiplies the weights by the scales of values.
  // Prefetches the keys or values of the next block.
  void add_values(int first, int last, const KeyBlock<Element>& block, float (*weights)[KEYS], float* acc) const {
    of_values_.apply(last - first, weights + first);
    const Ahead<Element> ahead = lookahead().after_values(block);
    const auto add = [&](const auto* const* values) {
      sluice::add_values(last - first, values, block.num, dim_, weights + first, acc + first * dim_, ahead);
    };
    if constexpr (!std::is_same_v<Element, float>)
      if (is_turned_) return add(wide_);
    add(block.values);
  }

 private:
  // Whether queries stay in registers, see HELD_DIM.
  bool is_held() const { return dim_ == HELD_DIM<Element>; }

  Lookahead<Element> lookahead() const { return {dim_, is_turned_, is_held()}; }

  int64_t dim_;
  float scale_;
  bool is_turned_ = false;
  Scales<Element> of_keys_, of_values_;
  alignas(64) float turned_[MAX_DIM * KEYS];  // [dim, KEYS] keys
  const float* wide_[KEYS];                   // values, widened if they have fewer bits
  alignas(64) float values_[std::is_same_v<Element, float> ? LANES : KEYS * MAX_DIM];
};

}  // namespace sluice
