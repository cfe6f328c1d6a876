// Attention of tokens of an encoder to all tokens of their run, in float32: whole rows of scores, and no cache.
//
// Keys lie in panels, so that a score is one chain over the numbers of a head, and a result one chain over the keys: a
// query's bits depend on nothing but its run.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "packed.h"

namespace sluice {

constexpr int KEY_VECS = 2;  // vectors in a panel of keys
constexpr int64_t KEY_PANEL = KEY_VECS * LANES;
constexpr int64_t QUERIES_A_PIECE = 8 * TILE;

// What a layer knows of all tokens of an input, written by its projection and read by its attention.
struct WholeHeads {
  float* first;  // [size()]
  int64_t tokens, heads, dim;

  int64_t hidden() const { return heads * dim; }
  int64_t panels() const { return (tokens + KEY_PANEL - 1) / KEY_PANEL; }
  int64_t wide() const { return (dim + LANES - 1) / LANES * LANES; }  // numbers of a value's row; what is over is zero

  int64_t queries_size() const { return tokens * row_stride(hidden()); }
  int64_t keys_size() const { return heads * panels() * dim * KEY_PANEL; }
  int64_t size() const { return queries_size() + keys_size() + heads * tokens * wide(); }

  // [tokens, hidden], multiplied by the scale of scores
  Rows queries() const { return {first, row_stride(hidden())}; }

  // Panel `panel` of a head's keys: [dim, KEY_PANEL]
  float* keys(int64_t head, int64_t panel) const {
    return first + queries_size() + (head * panels() + panel) * dim * KEY_PANEL;
  }

  // [tokens, wide] of a head
  float* values(int64_t head) const { return first + queries_size() + keys_size() + head * tokens * wide(); }
};

// Tokens [begin, end) see the tokens [low, high).
struct Run {
  int64_t begin, end, low, high;
};

// to [ROWS, WIDE vectors] = x [ROWS, depth] · w [depth, WIDE vectors]
template <int ROWS, int WIDE>
inline void multiply_rows_by(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t depth,
                             float* to, int64_t to_stride) {
  Vec acc[ROWS][WIDE] = {};
  for (int64_t i = 0; i < depth; ++i) {
    Vec of[WIDE];
    for (int v = 0; v < WIDE; ++v) of[v] = load(w + i * w_stride + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Vec value = broadcast(x[r * x_stride + i]);
      for (int v = 0; v < WIDE; ++v) acc[r][v] += value * of[v];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < WIDE; ++v) store(to + r * to_stride + v * LANES, acc[r][v]);
}

template <int ROWS, int WIDE>
inline void multiply_by(int rows, const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t depth,
                        float* to, int64_t to_stride) {
  if (rows == ROWS) return multiply_rows_by<ROWS, WIDE>(x, x_stride, w, w_stride, depth, to, to_stride);
  if constexpr (ROWS > 1) multiply_by<ROWS - 1, WIDE>(rows, x, x_stride, w, w_stride, depth, to, to_stride);
}

// Turns the scores of `num` keys into weights, whose sum is returned; those before `from` become zero.
inline float weigh_row(float* scores, int64_t from, int64_t num, int64_t padded) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + from, none);
  std::fill(scores + num, scores + padded, none);
  Vec best = broadcast(none), total{};
  for (int64_t i = 0; i < padded; i += LANES) best = greater(load(scores + i), best);
  const float peak = greatest(best);
  for (int64_t i = 0; i < padded; i += LANES) {
    const Vec weight = exp(load(scores + i) - peak);
    store(scores + i, weight);
    total += weight;
  }
  return sum(total);
}

// Up to TILE queries of one head, from token `first` on, which see the tokens [low, high).
inline void attend_tile(const WholeHeads& all, int64_t head, int64_t first, int rows, int64_t low, int64_t high,
                        Rows out) {
  static thread_local Workspace<float> workspace;
  const int64_t from = low / KEY_PANEL, past = (high + KEY_PANEL - 1) / KEY_PANEL, dim = all.dim, wide = all.wide();
  const int64_t padded = (past - from) * KEY_PANEL, skipped = low - from * KEY_PANEL, stride = row_stride(padded);
  float* scores = workspace.fit(TILE * (stride + wide));
  float* found = scores + TILE * stride;
  const Rows queries = all.queries();
  for (int64_t panel = from; panel < past; ++panel)
    multiply_by<TILE, KEY_VECS>(rows, queries[first] + head * dim, queries.stride, all.keys(head, panel), KEY_PANEL,
                                dim, scores + (panel - from) * KEY_PANEL, stride);
  float totals[TILE];
  for (int r = 0; r < rows; ++r) totals[r] = weigh_row(scores + r * stride, skipped, high - from * KEY_PANEL, padded);
  const float* values = all.values(head) + low * wide;
  int64_t d = 0;
  for (; d + VECS * LANES <= wide; d += VECS * LANES)
    multiply_by<TILE, VECS>(rows, scores + skipped, stride, values + d, wide, high - low, found + d, wide);
  for (; d + 2 * LANES <= wide; d += 2 * LANES)
    multiply_by<TILE, 2>(rows, scores + skipped, stride, values + d, wide, high - low, found + d, wide);
  for (; d < wide; d += LANES)
    multiply_by<TILE, 1>(rows, scores + skipped, stride, values + d, wide, high - low, found + d, wide);
  for (int r = 0; r < rows; ++r) {
    float* to = out[r] + head * dim;
    for (int64_t i = 0; i < dim; ++i) to[i] = found[r * wide + i] / totals[r];
  }
}

// out [tokens of the runs, hidden] = attention of these tokens; the runs follow each other.
inline void attend_whole(const WholeHeads& all, const Run* runs, int64_t num, Rows out) {
  std::vector<Run> pieces;
  for (int64_t at = 0; at < num; ++at)
    for (int64_t begin = runs[at].begin; begin < runs[at].end; begin += QUERIES_A_PIECE)
      pieces.push_back({begin, std::min(runs[at].end, begin + QUERIES_A_PIECE), runs[at].low, runs[at].high});
  Pool::instance().run(static_cast<int>(pieces.size() * all.heads), [&](int64_t at) {
    const Run& piece = pieces[at / all.heads];
    for (int64_t first = piece.begin; first < piece.end; first += TILE) {
      const int rows = static_cast<int>(std::min<int64_t>(TILE, piece.end - first));
      attend_tile(all, at % all.heads, first, rows, piece.low, piece.high, {out[first - runs->begin], out.stride});
    }
  });
}

}  // namespace sluice
