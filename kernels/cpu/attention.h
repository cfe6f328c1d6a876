// Attention of ragged queries over a paged cache, in float32 over keys and values of any of the cache's number formats.
//
// A query meets its keys in blocks of KEYS that start at multiples of KEYS, with a running maximum (Milakov &
// Gimelshein 2018; FlashAttention). What one query computes is the same in decode, in any chunk and in any batch, to
// the bit: a block that a neighbour sees and it does not is passed over. In a tree of drafts a query meets the tokens of
// its path at the positions that they would have in a chain, and so computes what it would there.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "slots.h"

namespace sluice {

constexpr int KEYS = 32;
constexpr int MAX_DIM = 256;
constexpr int QUERIES = 16;  // query rows that share a look-up of keys and values
constexpr int SHARING = 4;   // of these, rows that share a load of values
constexpr int PAIR = 2;      // and rows that share a load of keys

template <typename Element>
struct Attention {
  const float* q;  // [T, heads, dim], tokens q_stride apart
  int64_t q_stride;
  const Element* cache;  // [blocks, block_size, 2, kv_heads, width<Element>(dim)]
  int64_t block_size, kv_heads, heads, dim;
  const int32_t* tables;  // [rows, table_width]
  int64_t table_width;
  const int64_t* firsts;  // [rows] first token of each row
  const int64_t* counts;  // [rows] its tokens in this step
  const int64_t* contexts;  // [rows] tokens that exist after this step's write
  int64_t rows;
  const int64_t* positions;  // [T] of each token in its sequence
  const int32_t* paths;  // of rows with a tree: [counts, counts] each, by depth the tokens that each one sees; or null
  const int64_t* path_begins;  // [rows] where a row's paths begin, -1 without; or null
  int64_t window;  // keys visible to a query, itself included; 0: all
  float scale;
  float* out;  // [T, heads, dim] contiguous
};

// Up to QUERIES query heads of one sequence that use one head of keys: consecutive in (token, head of the group).
struct QueryTile {
  int count;
  const float* q[QUERIES];
  float* out[QUERIES];
  int64_t begin[QUERIES], end[QUERIES];  // visible keys
  const int32_t* path[QUERIES];  // where there is a tree, from position `start` on: see Attention
  int64_t start;  // of all keys before it, and of none behind it, queries with a path see the same
};

// Where the keys and values of one head lie, KEYS of them at a time.
template <typename Element>
struct KeyBlock {
  const Element* keys[KEYS];
  const Element* values[KEYS];
  float key_scales[KEYS], value_scales[KEYS];  // of formats that have them
  int num;

  // Positions [from, from + KEYS) of a sequence, of which [begin, end) exist. The others repeat a neighbour: keys
  // before a window may lie in blocks that were given back, and none of these is to be looked at. With a path what is at
  // `start` and behind it lies where the path says, in ascending order too.
  void find(const Attention<Element>& job, const int32_t* table, int64_t kv_head, int64_t from, int64_t begin,
            int64_t end, const int32_t* path, int64_t start) {
    const int64_t one = width<Element>(job.dim), slot = 2 * job.kv_heads * one;
    num = static_cast<int>(std::min<int64_t>(KEYS, end - from));
    int64_t block = -1, within = 0;
    for (int j = 0; j < KEYS; ++j) {
      int64_t position = std::min(std::max(from + j, begin), end - 1);
      if (path != nullptr && position >= start) position = start + path[position - start];
      if (block < 0 || position >= (block + 1) * job.block_size) block = position / job.block_size;
      within = position - block * job.block_size;
      keys[j] = job.cache + (table[block] * job.block_size + within) * slot + kv_head * one;
      values[j] = keys[j] + job.kv_heads * one;
      if constexpr (IS_SCALED<Element>) {
        key_scales[j] = scale_of(keys[j], job.dim);
        value_scales[j] = scale_of(values[j], job.dim);
      }
    }
  }
};

// Scores of ROWS queries, a power of two. Each is a dot product in LANES chains whose ends are added by `sums`, whether
// the vectors of one call belong to LANES keys of one query or to fewer keys of several.
template <int ROWS, typename Element>
inline void score_keys(const float* const* q, const KeyBlock<Element>& block, int64_t dim, float scale,
                       float (*scores)[KEYS]) {
  constexpr int WIDTH = LANES / ROWS;
  for (int from = 0; from < KEYS; from += WIDTH) {
    Vec acc[LANES] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec query[ROWS];
      for (int r = 0; r < ROWS; ++r) query[r] = load(q[r] + d);
      for (int j = 0; j < WIDTH; ++j) {
        const Vec key = load(block.keys[from + j] + d);
        for (int r = 0; r < ROWS; ++r) acc[r * WIDTH + j] += query[r] * key;
      }
    }
    const Vec scaled = sums(acc) * scale;
    float each[LANES];
    store(each, scaled);
    for (int r = 0; r < ROWS; ++r) std::copy(each + r * WIDTH, each + (r + 1) * WIDTH, scores[r] + from);
  }
}

// acc += weights · values, for COUNT rows. The order of keys is the same for each row, however many there are.
template <int COUNT, typename Element>
inline void add_values(const KeyBlock<Element>& block, int64_t dim, const float (*weights)[KEYS],
                       float (*acc)[MAX_DIM]) {
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec sums[COUNT];
    for (int r = 0; r < COUNT; ++r) sums[r] = load(acc[r] + d);
    for (int j = 0; j < block.num; ++j) {
      const Vec value = load(block.values[j] + d);
      for (int r = 0; r < COUNT; ++r) sums[r] += weights[r][j] * value;
    }
    for (int r = 0; r < COUNT; ++r) store(acc[r] + d, sums[r]);
  }
}

template <typename Element>
inline void add_values(int count, const KeyBlock<Element>& block, int64_t dim, const float (*weights)[KEYS],
                       float (*acc)[MAX_DIM]) {
  for (int r = 0; r < count; r += SHARING) switch (count - r) {
      case 1: add_values<1>(block, dim, weights + r, acc + r); break;
      case 2: add_values<2>(block, dim, weights + r, acc + r); break;
      case 3: add_values<3>(block, dim, weights + r, acc + r); break;
      default: add_values<SHARING>(block, dim, weights + r, acc + r);
    }
}

// Turns one query's scores of keys [from, from + KEYS), of which it sees [begin, end), into weights; rescales what it
// has when the peak rises.
inline void weigh(float* scores, int64_t from, int64_t begin, int64_t end, float& peak, float& total, float* acc,
                  int64_t dim) {
  const float none = -std::numeric_limits<float>::infinity();
  if (from + KEYS <= begin || from >= end) {
    std::fill(scores, scores + KEYS, 0.0f);
    return;
  }
  if (from < begin || from + KEYS > end)
    for (int64_t j = 0; j < KEYS; ++j)
      if (from + j < begin || from + j >= end) scores[j] = none;
  Vec best = load(scores);
  for (int j = LANES; j < KEYS; j += LANES) best = greater(best, load(scores + j));
  const float highest = greatest(best);
  if (highest > peak) {
    const float shrink = exp(broadcast(peak - highest))[0];  // 0 the first time
    total *= shrink;
    for (int64_t d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) * shrink);
    peak = highest;
  }
  Vec added{};
  for (int j = 0; j < KEYS; j += LANES) {
    const Vec weight = exp(load(scores + j) - peak);
    store(scores + j, weight);
    added += weight;
  }
  total += sum(added);
}

inline void multiply(float* scores, const float* by) {
  for (int j = 0; j < KEYS; j += LANES) store(scores + j, load(scores + j) * load(by + j));
}

// What the queries of a tile have of their softmax so far.
struct Running {
  float acc[QUERIES][MAX_DIM];
  float peak[QUERIES], total[QUERIES];
};

// Queries [first, last) of a tile meet the keys [from, from + KEYS) of a block.
template <typename Element>
inline void meet(const Attention<Element>& job, const QueryTile& tile, int first, int last,
                 const KeyBlock<Element>& block, int64_t from, Running& running) {
  float scores[QUERIES][KEYS];
  int scored = first;
  for (; scored + PAIR <= last; scored += PAIR)
    score_keys<PAIR>(tile.q + scored, block, job.dim, job.scale, scores + scored);
  for (; scored < last; ++scored) score_keys<1>(tile.q + scored, block, job.dim, job.scale, scores + scored);
  for (int r = first; r < last; ++r) {
    if constexpr (IS_SCALED<Element>) multiply(scores[r], block.key_scales);
    weigh(scores[r], from, tile.begin[r], tile.end[r], running.peak[r], running.total[r], running.acc[r], job.dim);
    if constexpr (IS_SCALED<Element>) multiply(scores[r], block.value_scales);
  }
  add_values(last - first, block, job.dim, scores + first, running.acc + first);
}

// The same where their paths part: each token's queries meet what lies on its own.
template <typename Element>
inline void meet_paths(const Attention<Element>& job, const QueryTile& tile, const int32_t* table, int64_t kv_head,
                       KeyBlock<Element>& block, int64_t from, Running& running) {
  for (int first = 0, last; first < tile.count; first = last) {
    for (last = first + 1; last < tile.count && tile.path[last] == tile.path[first];) ++last;
    if (from >= tile.end[first]) continue;
    block.find(job, table, kv_head, from, tile.begin[first], tile.end[first], tile.path[first], tile.start);
    meet(job, tile, first, last, block, from, running);
  }
}

template <typename Element>
inline void attend(const Attention<Element>& job, const QueryTile& tile, const int32_t* table, int64_t kv_head) {
  Running running;
  int64_t begin = tile.begin[0], end = tile.end[0];
  for (int r = 0; r < tile.count; ++r) {
    std::fill(running.acc[r], running.acc[r] + job.dim, 0.0f);
    running.peak[r] = -std::numeric_limits<float>::infinity();
    running.total[r] = 0.0f;
    begin = std::min(begin, tile.begin[r]), end = std::max(end, tile.end[r]);
  }
  const bool has_tree = tile.path[0] != nullptr;
  KeyBlock<Element> block;
  for (int64_t from = begin / KEYS * KEYS; from < end; from += KEYS) {
    if (has_tree && from + KEYS > tile.start) {
      meet_paths(job, tile, table, kv_head, block, from, running);
      continue;
    }
    block.find(job, table, kv_head, from, begin, end, nullptr, 0);
    meet(job, tile, 0, tile.count, block, from, running);
  }
  for (int r = 0; r < tile.count; ++r)
    for (int64_t d = 0; d < job.dim; d += LANES)
      store(tile.out[r] + d, load(running.acc[r] + d) / running.total[r]);
}

// Piece `at` of one row: a tile of its query heads that share a head of keys.
template <typename Element>
inline void attend(const Attention<Element>& job, int64_t row, int64_t at) {
  const int64_t group = job.heads / job.kv_heads, kv_head = at % job.kv_heads, first = at / job.kv_heads * QUERIES;
  const int64_t num = job.counts[row] * group, paths = job.paths == nullptr ? -1 : job.path_begins[row];
  QueryTile tile;
  tile.start = job.contexts[row] - job.counts[row];
  tile.count = static_cast<int>(std::min<int64_t>(QUERIES, num - first));
  for (int r = 0; r < tile.count; ++r) {
    const int64_t token = (first + r) / group, head = kv_head * group + (first + r) % group;
    tile.q[r] = job.q + (job.firsts[row] + token) * job.q_stride + head * job.dim;
    tile.out[r] = job.out + ((job.firsts[row] + token) * job.heads + head) * job.dim;
    tile.end[r] = job.positions[job.firsts[row] + token] + 1;
    tile.path[r] = paths < 0 ? nullptr : job.paths + paths + token * job.counts[row];
    tile.begin[r] = job.window == 0 ? 0 : std::max<int64_t>(0, tile.end[r] - job.window);
  }
  attend(job, tile, job.tables + row * job.table_width, kv_head);
}

template <typename Element>
inline void run(const Attention<Element>& job) {
  std::vector<int64_t> ends(job.rows);  // pieces of the rows up to and including each
  int64_t pieces = 0;
  const int64_t group = job.heads / job.kv_heads;
  for (int64_t row = 0; row < job.rows; ++row)
    ends[row] = pieces += (job.counts[row] * group + QUERIES - 1) / QUERIES * job.kv_heads;
  Pool::instance().run(static_cast<int>(pieces), [&](int64_t piece) {
    const int64_t row = std::upper_bound(ends.begin(), ends.end(), piece) - ends.begin();
    attend(job, row, piece - (row == 0 ? 0 : ends[row - 1]));
  });
}

}  // namespace sluice
