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
#include "vector_attention.h"

namespace sluice {

// The running softmax of a tile's queries. `peak` is padded by a vector.
struct Running {
  alignas(64) float acc[QUERIES * MAX_DIM];  // [QUERIES, dim]
  float peak[QUERIES + LANES];
  float totals[QUERIES][LANES];  // of weights, by the key's lane
};

// Sets the scores of keys [from, from + KEYS) outside [begin, end) to minus infinity.
inline void hide(float* scores, int64_t from, int64_t begin, int64_t end) {
  if (from >= begin && from + KEYS <= end) return;
  for (int64_t j = 0; j < KEYS; ++j)
    if (from + j < begin || from + j >= end) scores[j] = -std::numeric_limits<float>::infinity();
}

// Turns the scores of keys [from, from + KEYS) into softmax weights, for up to NUM queries from `first` on. Where the
// maximum rises, rescales the query's sums. The sums of a query that sees none of the keys stay unchanged. Not inlined,
// as it is long and called from several places.
template <int NUM>
[[gnu::noinline]] void weigh(const QueryTile& tile, int first, int count, int64_t from, float (*scores)[KEYS],
                             Running& running, int64_t dim) {
  const Vec none = broadcast(-std::numeric_limits<float>::infinity());
  const auto sees = [&](int r) {
    return r < count && from + KEYS > tile.begin[first + r] && from < tile.end[first + r];
  };
  Vec best[NUM];
  for (int r = 0; r < NUM; ++r) {
    best[r] = none;
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
    Vec total = load(running.totals[first + r]) * shrinks[r];
    for (int j = 0; j < KEYS; j += LANES) {
      const Vec weight = sees(r) ? exp_of_negative(load(scores[r] + j) - peaks[r]) : Vec{};
      store(scores[r] + j, weight);
      total += weight;
    }
    store(running.totals[first + r], total);
  }
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

// A block of keys, ready to meet queries.
template <typename Element, typename Products>
struct Ready {
  const KeyBlock<Element>& block;
  Products& products;
  Scales<Element> of_keys, of_values;

  // `rows`: how many queries meet the block.
  Ready(const KeyBlock<Element>& block, Products& products, int64_t dim, int rows)
      : block(block), products(begun(block, products, rows)), of_keys(block.keys, dim), of_values(block.values, dim) {}

 private:
  static Products& begun(const KeyBlock<Element>& block, Products& products, int rows) {
    products.begin(block, rows);
    return products;
  }
};

// Adds the keys [from, from + KEYS) of a block to the running softmax of queries [first, last) of tile `at`.
template <typename Element, typename Products>
inline void meet(const Attention<Element>& job, const Ready<Element, Products>& ready, const QueryTile& tile, int at,
                 int first, int last, int64_t from, Running& running) {
  alignas(64) float scores[QUERIES][KEYS];
  ready.products.score(tile, at, first, last, ready.block, scores);
  ready.of_keys.apply(last - first, scores + first);
  if (job.cap > 0.0f)
    for (int r = first; r < last; ++r) soften(scores[r], KEYS, job.cap);
  for (int r = first; r < last; r += LANES) {
    const int count = std::min(LANES, last - r);
    if (count <= FEW) weigh<FEW>(tile, r, count, from, scores + r, running, job.dim);
    else weigh<LANES>(tile, r, count, from, scores + r, running, job.dim);
  }
  ready.of_values.apply(last - first, scores + first);
  ready.products.add_values(first, last, ready.block, scores, running.acc);
}

// Does the same in a draft tree, token by token: each token's queries attend to the keys on its own path.
template <typename Element, typename Products>
inline void meet_paths(const Attention<Element>& job, const QueryTile& tile, Products& products, const int32_t* table,
                       int64_t kv_head, KeyBlock<Element>& block, int64_t from, Running& running) {
  for (int first = 0, last; first < tile.count; first = last) {
    for (last = first + 1; last < tile.count && tile.path[last] == tile.path[first];) ++last;
    if (from >= tile.end[first]) continue;
    block.find(job, table, kv_head, from, tile.begin[first], tile.end[first], tile.path[first], tile.start);
    meet(job, Ready(block, products, job.dim, last - first), tile, 0, first, last, from, running);
  }
}

// The queries of a piece of work: for each of its key heads a tile, all of the same tokens; or for its only key head
// several tiles of one sequence, which share the preparing of a block.
struct Queries {
  int64_t first;  // the first key head
  int heads;
  int num;  // tiles
  QueryTile tiles[MOST_TILES];
  Running running[MOST_TILES];
};

// The keys that some queries see, [begin, end).
struct Visible {
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;

  void add(int64_t from, int64_t to) { begin = std::min(begin, from), end = std::max(end, to); }
};

inline Visible visible(const QueryTile& tile, int first, int last) {
  Visible seen;
  for (int r = first; r < last; ++r) seen.add(tile.begin[r], tile.end[r]);
  return seen;
}

// Adds the keys [low, high) of one row, or of rows that have the same ones, to the running softmax of their queries
// [first, last). Goes through all heads of a block before the next one: in memory they lie behind each other, and the
// processor fetches ahead what is read in order.
template <typename Element, typename Products>
inline void meet_keys(const Attention<Element>& job, Queries& queries, Products& products, int first, int last,
                      int64_t low, int64_t high) {
  const QueryTile* tiles = queries.tiles;
  const int tiles_a_head = queries.num / queries.heads;
  int rows = 0;  // of a head
  Visible seen, of_tiles[MOST_TILES];
  for (int at = 0; at < tiles_a_head; ++at) {
    const int past = std::min(last, tiles[at].count);
    of_tiles[at] = visible(tiles[at], first, past), rows += past - first;
    seen.add(of_tiles[at].begin, of_tiles[at].end);
  }
  const int64_t begin = std::max(seen.begin, low), end = std::min(seen.end, high);
  const int32_t* table = tiles[0].table[first];
  const bool has_tree = tiles[0].path[first] != nullptr;
  KeyBlock<Element> blocks[2];  // one is computed while the other is prefetched
  int turn = 0;
  const int64_t lowest = begin / KEYS * KEYS;
  blocks[turn].find(job, table, queries.first, lowest, begin, end, nullptr, 0);
  for (int64_t from = lowest; from < end; from += KEYS)
    for (int head = 0; head < queries.heads; ++head, turn ^= 1) {
      KeyBlock<Element>&block = blocks[turn], &next = blocks[turn ^ 1];
      if (has_tree && from + KEYS > tiles[0].start) {  // a piece of one tile
        meet_paths(job, tiles[0], products, table, queries.first, block, from, queries.running[0]);
        continue;
      }
      if (head + 1 < queries.heads) {
        next.find_beside(block, job.cache.head);
      } else if (from + KEYS < end) {
        next.find(job, table, queries.first, from + KEYS, begin, end, nullptr, 0);
      }
      if (head + 1 < queries.heads || from + KEYS < end) block.ahead = &next;
      const Ready ready(block, products, job.dim, rows);
      for (int of = 0; of < tiles_a_head; ++of) {
        if (from + KEYS <= of_tiles[of].begin || from >= of_tiles[of].end) continue;
        const int at = head * tiles_a_head + of, past = std::min(last, tiles[at].count);
        meet(job, ready, tiles[at], at, first, past, from, queries.running[at]);
      }
    }
}

// The first `shared` keys are read once for all rows of the tile, the others row by row.
template <typename Element, typename Products>
inline void attend(const Attention<Element>& job, Queries& queries, Products& products, int64_t shared) {
  const QueryTile& tile = queries.tiles[0];
  for (int at = 0; at < queries.num; ++at) {
    Running& running = queries.running[at];
    std::fill_n(running.acc, queries.tiles[at].count * job.dim, 0.0f);
    std::fill_n(running.peak, QUERIES + LANES, -std::numeric_limits<float>::infinity());
    std::fill_n(running.totals[0], QUERIES * LANES, 0.0f);
  }
  if (shared > 0) meet_keys(job, queries, products, 0, tile.count, 0, shared);
  for (int first = 0, last; first < tile.count; first = last) {
    for (last = first + 1; last < tile.count && tile.table[last] == tile.table[first];) ++last;
    meet_keys(job, queries, products, first, last, shared, std::numeric_limits<int64_t>::max());
  }
  for (int at = 0; at < queries.num; ++at) {
    const QueryTile& own = queries.tiles[at];
    const Running& running = queries.running[at];
    for (int r = 0; r < own.count; ++r) {
      const float total = sum(load(running.totals[r])) + std::exp(own.sink[r] - running.peak[r]);
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

// Computes piece `at` of a bundle: some tiles of queries of a key head, or one for some consecutive key heads.
template <typename Element>
inline void attend(const Attention<Element>& job, const Bundle& bundle, int64_t at) {
  const int64_t parts = parts_of(job.kv_heads, bundle.span);
  const int64_t part = parts - 1 - at % parts;  // pieces descend: memory is read upwards
  Queries queries;
  queries.first = part * bundle.span;
  queries.heads = static_cast<int>(std::min(bundle.span, job.kv_heads - queries.first));
  const int64_t first = at / parts * bundle.depth, depth = std::min(bundle.depth, bundle.tiles - first);
  queries.num = queries.heads * static_cast<int>(depth);
  for (int64_t tile = 0; tile < queries.num; ++tile)
    make_tile(job, bundle, (first + tile % depth) * QUERIES, queries.first + tile / depth, queries.tiles[tile]);
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Element, uint16_t>)
    if (ByTiles::takes(job.dim)) {
      ByTiles products(job, queries.tiles[0]);
      return attend(job, queries, products, bundle.shared);
    }
#endif
#if defined(__AVX512VNNI__)
  if constexpr (std::is_same_v<Element, int8_t>) {
    ByIntegers products(job, queries.tiles, queries.num);
    return attend(job, queries, products, bundle.shared);
  }
#endif
  ByVectors<Element> products(job);
  attend(job, queries, products, bundle.shared);
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
