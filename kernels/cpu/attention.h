// Attention of ragged queries over a paged cache, and the rotation and write that come before it, in float32.
//
// A query meets its keys in blocks of KEYS that start at multiples of KEYS, with a running maximum (Milakov &
// Gimelshein 2018; FlashAttention). What one query computes is the same in decode, in any chunk and in any batch, to
// the bit: a block that a neighbour sees and it does not is passed over.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "vector.h"

namespace sluice {

constexpr int KEYS = 32;
constexpr int MAX_DIM = 256;
constexpr int QUERIES = 4;  // query rows that share a load of keys and values

struct Attention {
  const float* q;  // [T, heads, dim], tokens q_stride apart
  int64_t q_stride;
  const float* cache;  // [blocks, block_size, 2, kv_heads, dim]
  int64_t block_size, kv_heads, heads, dim;
  const int32_t* tables;  // [rows, table_width]
  int64_t table_width;
  const int64_t* firsts;  // [rows] first token of each row
  const int64_t* counts;  // [rows] its tokens in this step
  const int64_t* contexts;  // [rows] tokens that exist after this step's write
  int64_t rows;
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
};

template <int COUNT>
inline void score_keys(const QueryTile& tile, const float* const* keys, int num, int64_t dim, float scale,
                       float (*scores)[KEYS]) {
  for (int j = 0; j < num; ++j) {
    Vec acc[COUNT] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      const Vec key = load(keys[j] + d);
      for (int r = 0; r < COUNT; ++r) acc[r] += load(tile.q[r] + d) * key;
    }
    for (int r = 0; r < COUNT; ++r) scores[r][j] = sum(acc[r]) * scale;
  }
}

template <int COUNT>
inline void add_values(const float* const* values, int num, int64_t dim, const float (*weights)[KEYS],
                       float (*acc)[MAX_DIM]) {
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec sums[COUNT];
    for (int r = 0; r < COUNT; ++r) sums[r] = load(acc[r] + d);
    for (int j = 0; j < num; ++j) {
      const Vec value = load(values[j] + d);
      for (int r = 0; r < COUNT; ++r) sums[r] += weights[r][j] * value;
    }
    for (int r = 0; r < COUNT; ++r) store(acc[r] + d, sums[r]);
  }
}

// Turns one query's scores of keys [from, from + KEYS) into weights and rescales what it has. False: it sees none.
inline bool weigh(float* scores, int64_t from, int64_t begin, int64_t end, float& peak, float& total, float* acc,
                  int64_t dim) {
  const float none = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < KEYS; ++j)
    if (from + j < begin || from + j >= end) scores[j] = none;
  float best = peak;
  for (int j = 0; j < KEYS; j += LANES) best = std::max(best, greatest(load(scores + j)));
  if (from + KEYS <= begin || from >= end) {
    for (int j = 0; j < KEYS; ++j) scores[j] = 0.0f;
    return false;
  }
  if (best > peak) {
    const float shrink = exp(broadcast(peak - best))[0];  // 0 the first time
    total *= shrink;
    for (int64_t d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) * shrink);
    peak = best;
  }
  Vec sums{};
  for (int j = 0; j < KEYS; j += LANES) {
    const Vec weight = exp(load(scores + j) - peak);
    store(scores + j, weight);
    sums += weight;
  }
  total += sum(sums);
  return true;
}

template <int COUNT>
inline void attend_tile(const Attention& job, const QueryTile& tile, const int32_t* table, int64_t kv_head) {
  float acc[COUNT][MAX_DIM] = {};
  float scores[COUNT][KEYS];
  float peak[COUNT], total[COUNT] = {};
  std::fill(peak, peak + COUNT, -std::numeric_limits<float>::infinity());
  int64_t begin = tile.begin[0], end = tile.end[0];
  for (int r = 1; r < COUNT; ++r) begin = std::min(begin, tile.begin[r]), end = std::max(end, tile.end[r]);
  const int64_t slot = 2 * job.kv_heads * job.dim, to_values = job.kv_heads * job.dim;
  const float* head = job.cache + kv_head * job.dim;
  for (int64_t from = begin / KEYS * KEYS; from < end; from += KEYS) {
    const int num = static_cast<int>(std::min<int64_t>(KEYS, end - from));
    const float* keys[KEYS];
    const float* values[KEYS];
    for (int j = 0; j < num; ++j) {
      // Keys before the window may lie in blocks that were given back: look at none of them.
      const int64_t position = std::max(from + j, begin);
      keys[j] = head + (table[position / job.block_size] * job.block_size + position % job.block_size) * slot;
      values[j] = keys[j] + to_values;
    }
    score_keys<COUNT>(tile, keys, num, job.dim, job.scale, scores);
    bool any = false;
    for (int r = 0; r < COUNT; ++r)
      any |= weigh(scores[r], from, tile.begin[r], tile.end[r], peak[r], total[r], acc[r], job.dim);
    if (any) add_values<COUNT>(values, num, job.dim, scores, acc);
  }
  for (int r = 0; r < COUNT; ++r)
    for (int64_t d = 0; d < job.dim; d += LANES) store(tile.out[r] + d, load(acc[r] + d) / total[r]);
}

// Piece `at` of one row: a tile of its query heads that share a head of keys.
inline void attend(const Attention& job, int64_t row, int64_t at) {
  const int64_t group = job.heads / job.kv_heads, kv_head = at % job.kv_heads, first = at / job.kv_heads * QUERIES;
  const int64_t num = job.counts[row] * group, start = job.contexts[row] - job.counts[row];
  QueryTile tile;
  tile.count = static_cast<int>(std::min<int64_t>(QUERIES, num - first));
  for (int r = 0; r < tile.count; ++r) {
    const int64_t token = (first + r) / group, head = kv_head * group + (first + r) % group;
    tile.q[r] = job.q + (job.firsts[row] + token) * job.q_stride + head * job.dim;
    tile.out[r] = job.out + ((job.firsts[row] + token) * job.heads + head) * job.dim;
    tile.end[r] = start + token + 1;
    tile.begin[r] = job.window == 0 ? 0 : std::max<int64_t>(0, tile.end[r] - job.window);
  }
  const int32_t* table = job.tables + row * job.table_width;
  switch (tile.count) {
    case 1: return attend_tile<1>(job, tile, table, kv_head);
    case 2: return attend_tile<2>(job, tile, table, kv_head);
    case 3: return attend_tile<3>(job, tile, table, kv_head);
    default: return attend_tile<4>(job, tile, table, kv_head);
  }
}

inline void run(const Attention& job) {
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

struct RotateAndWrite {
  float* heads;  // [T, num_heads + kv_heads (keys) + kv_heads (values), dim]: queries and keys rotated in place
  const float* cis;  // [T, dim / 2] complex
  int64_t tokens, num_heads, kv_heads, dim;
  float* cache;  // [slots, 2, kv_heads, dim]
  const int64_t* slots;  // [T] where each token's keys and values go
};

inline void run(const RotateAndWrite& job) {
  const int64_t rotated = job.num_heads + job.kv_heads, width = (rotated + job.kv_heads) * job.dim;
  const int64_t kept = 2 * job.kv_heads * job.dim;
  const auto one = [&](int64_t t) {
    float* x = job.heads + t * width;
    const float* cis = job.cis + t * job.dim;
    for (int64_t h = 0; h < rotated; ++h)
      for (int64_t d = 0; d < job.dim; d += 2) {
        float* pair = x + h * job.dim + d;
        const float a = pair[0], b = pair[1], c = cis[d], s = cis[d + 1];
        pair[0] = a * c - b * s;
        pair[1] = a * s + b * c;
      }
    std::memcpy(job.cache + job.slots[t] * kept, x + job.num_heads * job.dim, kept * sizeof(float));
  };
  const int64_t pieces = std::min<int64_t>(job.tokens * width <= SMALL ? 1 : 64, job.tokens);
  Pool::instance().run(static_cast<int>(pieces), [&](int64_t piece) {
    for (int64_t t = job.tokens * piece / pieces; t < job.tokens * (piece + 1) / pieces; ++t) one(t);
  });
}

}  // namespace sluice
