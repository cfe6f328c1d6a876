// Attention of ragged queries over a paged cache, in float32, for each number format of the cache. On processors with
// AMX, bfloat16 keys are multiplied by queries rounded to bfloat16 (tile_attention.h); on those with VNNI, int8 keys by
// queries rounded to 16 bits (integer_attention.h).
//
// A query attends to its keys in blocks of KEYS that start at multiples of KEYS, with a running maximum (Milakov &
// Gimelshein 2018; FlashAttention). A query's result is the same in decode, in any chunk and in any batch, to the bit:
// a block that only other queries of the tile see changes nothing for it. In a draft tree, the tokens of a query's path
// take the positions that they would have in a chain, so that the result equals that of the chain.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "bundles.h"
#include "integer_attention.h"
#include "soften.h"
#include "tile_attention.h"

namespace sluice {

// The running softmax of a tile's queries. `peak` and `total` are padded by a vector.
struct Running {
  alignas(64) float acc[QUERIES * MAX_DIM];  // [QUERIES, dim]
  float peak[QUERIES + LANES], total[QUERIES + LANES];
};

// acc [COUNT, dim] += weights · values, for the WIDE vectors from `d` on. The order of keys does not depend on COUNT.
// Prefetches the keys of the next block.
template <int COUNT, int WIDE, typename Element>
inline void add_vectors(const KeyBlock<Element>& block, int64_t dim, int64_t d, const float (*weights)[KEYS],
                        float* acc) {
  Vec sums[COUNT][WIDE];
  for (int r = 0; r < COUNT; ++r)
    for (int v = 0; v < WIDE; ++v) sums[r][v] = load(acc + r * dim + d + v * LANES);
  for (int j = 0; j < block.num; ++j) {
    Vec value[WIDE];
    for (int v = 0; v < WIDE; ++v) {
      value[v] = load(block.values[j] + d + v * LANES);
      fetch(block.ahead->keys[j], d + v * LANES, dim);
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
template <int COUNT, int WIDE, typename Element>
inline void add_values(const KeyBlock<Element>& block, int64_t dim, int64_t d, const float (*weights)[KEYS],
                       float* acc) {
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES) add_vectors<COUNT, WIDE>(block, dim, d, weights, acc);
  if constexpr (WIDE > 1) add_values<COUNT, WIDE / 2>(block, dim, d, weights, acc);
}

template <typename Element>
inline void add_values(int count, const KeyBlock<Element>& block, int64_t dim, const float (*weights)[KEYS],
                       float* acc) {
  for (int r = 0; r < count; r += SHARING) switch (count - r) {
      case 1: add_values<1, WIDEST>(block, dim, 0, weights + r, acc + r * dim); break;
      case 2: add_values<2, WIDEST>(block, dim, 0, weights + r, acc + r * dim); break;
      case 3: add_values<3, WIDEST / 2>(block, dim, 0, weights + r, acc + r * dim); break;
      default: add_values<SHARING, WIDEST / 2>(block, dim, 0, weights + r, acc + r * dim);
    }
}

// The matrix products of attention in float32 vectors.
template <typename Element>
struct ByVectors {
  const Attention<Element>& job;
  const QueryTile& tile;

  void score(int first, int last, const KeyBlock<Element>& block, float (*scores)[KEYS]) const {
    sluice::score(job, tile, first, last, block, scores);
  }

  void add_values(int first, int last, const KeyBlock<Element>& block, const float (*weights)[KEYS], float* acc) const {
    sluice::add_values(last - first, block, job.dim, weights + first, acc + first * job.dim);
  }
};

// Sets the scores of keys [from, from + KEYS) outside [begin, end) to minus infinity.
inline void hide(float* scores, int64_t from, int64_t begin, int64_t end) {
  if (from >= begin && from + KEYS <= end) return;
  for (int64_t j = 0; j < KEYS; ++j)
    if (from + j < begin || from + j >= end) scores[j] = -std::numeric_limits<float>::infinity();
}

// Turns the scores of keys [from, from + KEYS) into softmax weights, for up to NUM queries from `first` on. Where the
// maximum rises, rescales the query's sums. The sums of a query that sees none of the keys stay unchanged.
template <int NUM>
inline void weigh(const QueryTile& tile, int first, int count, int64_t from, float (*scores)[KEYS], Running& running,
                  int64_t dim) {
  const Vec none = broadcast(-std::numeric_limits<float>::infinity());
  const auto sees = [&](int r) {
    return r < count && from + KEYS > tile.begin[first + r] && from < tile.end[first + r];
  };
  Vec best[NUM], added[NUM];
  for (int r = 0; r < NUM; ++r) {
    best[r] = none, added[r] = Vec{};
    if (!sees(r)) continue;
    hide(scores[r], from, tile.begin[first + r], tile.end[first + r]);
    for (int j = 0; j < KEYS; j += LANES) best[r] = greater(best[r], load(scores[r] + j));
  }
  const Vec highest = first_lanes<NUM>(greatests<NUM>(best), none), before = load(running.peak + first);
  const Vec peak = highest > before ? highest : before;
  Vec shrink = broadcast(1.0f);
  if (has_any(highest > before)) shrink = highest > before ? exp(before - highest) : shrink;  // 0 the first time
  float peaks[LANES], shrinks[LANES];
  store(peaks, peak), store(shrinks, shrink), store(running.peak + first, peak);
  for (int r = 0; r < count; ++r) {
    float* acc = running.acc + (first + r) * dim;
    for (int64_t d = 0; shrinks[r] != 1.0f && d < dim; d += LANES) store(acc + d, load(acc + d) * shrinks[r]);
    for (int j = 0; j < KEYS; j += LANES) {
      const Vec weight = sees(r) ? exp(load(scores[r] + j) - peaks[r]) : Vec{};
      store(scores[r] + j, weight);
      added[r] += weight;
    }
  }
  const Vec more = first_lanes<NUM>(sums<NUM>(added), Vec{});
  store(running.total + first, load(running.total + first) * shrink + more);
}

// The scales of a block's keys or values, in formats that have scales. They are collected some time before they are
// used, as a vector cannot be read while its numbers are still being written; and after the keys or values have been
// prefetched, since the scales lie behind them.
template <typename Element>
struct Scales {
  float by[KEYS];

  Scales(const Element* const* from, int64_t dim) {
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
  Scales(const Element* const*, int64_t) {}
  void apply(int, float (*)[KEYS]) const {}
};

// Adds the keys [from, from + KEYS) of a block to the running softmax of queries [first, last) of a tile.
template <typename Element, typename Products>
inline void meet(const Attention<Element>& job, const QueryTile& tile, Products&& products, int first, int last,
                 const KeyBlock<Element>& block, int64_t from, Running& running) {
  alignas(64) float scores[QUERIES][KEYS];
  const Scales<Element> of_keys(block.keys, job.dim);
  products.score(first, last, block, scores);
  const Scales<Element> of_values(block.values, job.dim);
  of_keys.apply(last - first, scores + first);
  if (job.cap > 0.0f)
    for (int r = first; r < last; ++r) soften(scores[r], KEYS, job.cap);
  for (int r = first; r < last; r += LANES) {
    const int count = std::min(LANES, last - r);
    if (count <= FEW) weigh<FEW>(tile, r, count, from, scores + r, running, job.dim);
    else weigh<LANES>(tile, r, count, from, scores + r, running, job.dim);
  }
  of_values.apply(last - first, scores + first);
  products.add_values(first, last, block, scores, running.acc);
}

// Does the same in a draft tree, token by token: each token's queries attend to the keys on its own path.
template <typename Element, typename Products>
inline void meet_paths(const Attention<Element>& job, const QueryTile& tile, Products&& products, const int32_t* table,
                       int64_t kv_head, KeyBlock<Element>& block, int64_t from, Running& running) {
  for (int first = 0, last; first < tile.count; first = last) {
    for (last = first + 1; last < tile.count && tile.path[last] == tile.path[first];) ++last;
    if (from >= tile.end[first]) continue;
    block.find(job, table, kv_head, from, tile.begin[first], tile.end[first], tile.path[first], tile.start);
    meet(job, tile, products, first, last, block, from, running);
  }
}

// The query heads that a piece of work has: a tile for each of its key heads, all of the same tokens.
struct Heads {
  int64_t first;  // the first key head
  int num;
  QueryTile tiles[MOST_HEADS];
  Running running[MOST_HEADS];
};

// Adds the keys [low, high) of one row, or of rows that have the same ones, to the running softmax of their queries
// [first, last). Goes through all heads of a block before the next one: in memory they lie behind each other, and the
// processor fetches ahead what is read in order.
template <typename Element, typename Products>
inline void meet_keys(const Attention<Element>& job, Heads& heads, const Products& products, int first, int last,
                      int64_t low, int64_t high) {
  const QueryTile& tile = heads.tiles[0];
  int64_t begin = tile.begin[first], end = tile.end[first];
  for (int r = first; r < last; ++r) begin = std::min(begin, tile.begin[r]), end = std::max(end, tile.end[r]);
  begin = std::max(begin, low), end = std::min(end, high);
  const int32_t* table = tile.table[first];
  const bool has_tree = tile.path[first] != nullptr;
  KeyBlock<Element> blocks[2];  // one is computed while the other is prefetched
  int at = 0;
  const int64_t lowest = begin / KEYS * KEYS;
  blocks[at].find(job, table, heads.first, lowest, begin, end, nullptr, 0);
  for (int64_t from = lowest; from < end; from += KEYS)
    for (int head = 0; head < heads.num; ++head, at ^= 1) {
      KeyBlock<Element>&block = blocks[at], &next = blocks[at ^ 1];
      if (has_tree && from + KEYS > tile.start) {  // a piece of one head
        meet_paths(job, tile, products(0), table, heads.first, block, from, heads.running[0]);
        continue;
      }
      if (head + 1 < heads.num) {
        next.find_beside(block, job.cache.head);
      } else if (from + KEYS < end) {
        next.find(job, table, heads.first, from + KEYS, begin, end, nullptr, 0);
      }
      if (head + 1 < heads.num || from + KEYS < end) block.ahead = &next;
      meet(job, heads.tiles[head], products(head), first, last, block, from, heads.running[head]);
    }
}

// The first `shared` keys are read once for all rows of the tile, the others row by row.
template <typename Element, typename Products>
inline void attend(const Attention<Element>& job, Heads& heads, const Products& products, int64_t shared) {
  const QueryTile& tile = heads.tiles[0];
  for (int head = 0; head < heads.num; ++head) {
    Running& running = heads.running[head];
    std::fill_n(running.acc, tile.count * job.dim, 0.0f);
    std::fill_n(running.peak, QUERIES + LANES, -std::numeric_limits<float>::infinity());
    std::fill_n(running.total, QUERIES + LANES, 0.0f);
  }
  if (shared > 0) meet_keys(job, heads, products, 0, tile.count, 0, shared);
  for (int first = 0, last; first < tile.count; first = last) {
    for (last = first + 1; last < tile.count && tile.table[last] == tile.table[first];) ++last;
    meet_keys(job, heads, products, first, last, shared, std::numeric_limits<int64_t>::max());
  }
  for (int head = 0; head < heads.num; ++head) {
    const QueryTile& own = heads.tiles[head];
    const Running& running = heads.running[head];
    for (int r = 0; r < own.count; ++r) {
      const float total = running.total[r] + std::exp(own.sink[r] - running.peak[r]);
      for (int64_t d = 0; d < job.dim; d += LANES) store(own.out[r] + d, load(running.acc + r * job.dim + d) / total);
    }
  }
}

// Returns the tile `first` / QUERIES of the query heads that use one key head.
template <typename Element>
inline void make_tile(const Attention<Element>& job, const Bundle& bundle, int64_t first, int64_t kv_head,
                      QueryTile& tile) {
  const int64_t group = job.heads / job.kv_heads;
  const bool is_one = bundle.num == 1;
  const int64_t num = (is_one ? job.counts[bundle.rows[0]] : bundle.num) * group;
  tile.start = job.contexts[bundle.rows[0]] - job.counts[bundle.rows[0]];
  tile.count = static_cast<int>(std::min<int64_t>(QUERIES, num - first));
  for (int r = 0; r < tile.count; ++r) {
    const int64_t token = (first + r) / group, head = kv_head * group + (first + r) % group;
    const int64_t row = bundle.rows[is_one ? 0 : token], index = job.firsts[row] + (is_one ? token : 0);
    const int64_t paths = job.paths == nullptr ? -1 : job.path_begins[row];
    tile.table[r] = job.tables + row * job.table_width;
    tile.q[r] = job.q + index * job.q_stride + head * job.dim;
    tile.out[r] = job.out + index * job.out_stride + head * job.dim;
    tile.end[r] = job.ends == nullptr ? job.positions[index] + 1 : job.ends[index];
    tile.path[r] = paths < 0 ? nullptr : job.paths + paths + token * job.counts[row];
    tile.sink[r] = job.sinks == nullptr ? -std::numeric_limits<float>::infinity() : job.sinks[head];
    tile.begin[r] = job.window == 0 ? 0 : std::max<int64_t>(0, job.positions[index] + 1 - job.window);
  }
}

// Computes piece `at` of a bundle: a tile of queries, for some consecutive key heads.
template <typename Element>
inline void attend(const Attention<Element>& job, const Bundle& bundle, int64_t at) {
  const int64_t parts = parts_of(job.kv_heads, bundle.span);
  const int64_t part = parts - 1 - at % parts;  // pieces descend: memory is read upwards
  Heads heads;
  heads.first = part * bundle.span;
  heads.num = static_cast<int>(std::min(bundle.span, job.kv_heads - heads.first));
  for (int head = 0; head < heads.num; ++head)
    make_tile(job, bundle, at / parts * QUERIES, heads.first + head, heads.tiles[head]);
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Element, uint16_t>)
    if (ByTiles::takes(job.dim)) {
      ByTiles products{job, heads.tiles[0]};
      return attend(job, heads, [&](int) -> ByTiles& { return products; }, bundle.shared);
    }
#endif
#if defined(__AVX512VNNI__)
  if constexpr (std::is_same_v<Element, int8_t>) {
    ByIntegers products[MOST_HEADS];
    for (int head = 0; head < heads.num; ++head) products[head].take(job, heads.tiles[head]);
    return attend(job, heads, [&](int head) -> ByIntegers& { return products[head]; }, bundle.shared);
  }
#endif
  attend(job, heads, [&](int head) { return ByVectors<Element>{job, heads.tiles[head]}; }, bundle.shared);
}

template <typename Element>
inline void run(const Attention<Element>& job) {
  const Bundles bundles(job);
  Pool::instance().run(static_cast<int>(bundles.pieces()), [&](int64_t at) {
    const auto [bundle, piece] = bundles.find(bundles.pieces() - 1 - at);  // longest first: see Bundles
    attend(job, bundle, piece);
  });
}

}  // namespace sluice
