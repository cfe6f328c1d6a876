// Attention of ragged queries over a paged cache, in float32, for each number format of the cache. On processors with
// AMX or AVX-512 BF16, bfloat16 keys are multiplied by queries rounded to bfloat16 (tile_attention.h,
// pair_attention.h); on those with VNNI, int8 keys by queries rounded to 16 bits (integer_attention.h).
//
// A query attends to its keys in blocks of KEYS_OF<Element> that start at multiples of it, with a running maximum
// (Milakov & Gimelshein 2018; FlashAttention). A query's result is the same in decode, in any chunk and in any batch,
// to the bit: a block that only other queries of the tile see changes nothing for it. In a draft tree, the tokens of a
// query's path take the positions that they would have in a chain, so that the result equals that of the chain.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "bundles.h"
#include "integer_attention.h"
#include "pair_attention.h"
#include "running.h"
#include "soften.h"
#include "tile_attention.h"
#include "vector_attention.h"

namespace sluice {

// Adds the keys [from, from + KEYS_OF<Element>) of a block to the running softmax of queries [first, last) of tile
// `at`.
template <typename Element, typename Products>
inline void meet(const Attention<Element>& job, Products& products, const KeyBlock<Element>& block,
                 const QueryTile& tile, int at, int first, int last, int64_t from, Running& running) {
  alignas(64) float scores[QUERIES][KEYS_OF<Element>];
  products.score(tile, at, first, last, block, scores);
  if (job.cap > 0.0f)
    for (int r = first; r < last; ++r) soften(scores[r], KEYS_OF<Element>, job.cap);
  for (int r = first; r < last; r += LANES) {
    const int count = std::min(LANES, last - r);
    if (count <= FEW) weigh<FEW>(tile, r, count, from, scores + r, running, job.dim);
    else weigh<LANES>(tile, r, count, from, scores + r, running, job.dim);
  }
  products.add_values(first, last, block, scores, running.acc);
}

// Does the same in a draft tree, token by token: each token's queries attend to the keys on its own path.
template <typename Element, typename Products>
inline void meet_paths(const Attention<Element>& job, const QueryTile& tile, Products& products, const int32_t* table,
                       int64_t kv_head, KeyBlock<Element>& block, int64_t from, Running& running) {
  for (int first = 0, last; first < tile.count; first = last) {
    for (last = first + 1; last < tile.count && tile.path[last] == tile.path[first];) ++last;
    if (from >= tile.end[first]) continue;
    block.find(job, table, kv_head, from, tile.begin[first], tile.end[first], tile.path[first], tile.start);
    products.begin(block, last - first);
    meet(job, products, block, tile, 0, first, last, from, running);
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
  constexpr int NUM = KEYS_OF<Element>;
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
  BlocksAhead<Element> blocks(job, table, queries.first, queries.heads, begin, end);
  for (int64_t from = begin / NUM * NUM; from < end; from += NUM)
    for (int head = 0; head < queries.heads; ++head) {
      KeyBlock<Element>& block = blocks.take();
      if (has_tree && from + NUM > tiles[0].start) {  // a piece of one tile
        meet_paths(job, tiles[0], products, table, queries.first, block, from, queries.running[0]);
        continue;
      }
      products.begin(block, rows);
      for (int of = 0; of < tiles_a_head; ++of) {
        if (from + NUM <= of_tiles[of].begin || from >= of_tiles[of].end) continue;
        const int at = head * tiles_a_head + of, past = std::min(last, tiles[at].count);
        meet(job, products, block, tiles[at], at, first, past, from, queries.running[at]);
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
    alignas(64) float totals[QUERIES];
    for (int from = 0; from < own.count; from += LANES) {
      Vec rows[LANES];
      for (int i = 0; i < LANES; ++i) rows[i] = load(running.totals[from + i]);
      store(totals + from, sums(rows));
    }
    for (int r = 0; r < own.count; ++r) {
      const float total = totals[r] + (job.sinks == nullptr ? 0.0f : std::exp(own.sink[r] - running.peak[r]));
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
#elif defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Element, uint16_t>)
    if (ByPairs::takes(job.dim)) {
      ByPairs products(job, queries.tiles, queries.num);
      return attend(job, queries, products, bundle.shared);
    }
#endif
#if defined(__AVX512VNNI__)
  if constexpr (std::is_same_v<Element, int8_t>) {
    ByIntegers products(job, queries.tiles, queries.num);
    return attend(job, queries, products, bundle.shared);
  } else
#endif
  {
    ByVectors<Element> products(job);
    attend(job, queries, products, bundle.shared);
  }
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
