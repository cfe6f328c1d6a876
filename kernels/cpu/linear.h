// x [M, K] times a packed weight [N, K] transposed, with what surrounds it in a decoder fused in. Weights are float32
// or bfloat16, which widens to float32 without rounding (pairs.h has another way); everything is computed in float32.
//
// Each output is one chain of fused multiply-adds over k = 0 … K-1, whatever M, the tile it falls into or the thread
// that computes it: a row's bits depend on nothing but the row. Layout: [panel][k][column].
#pragma once

#include <vector>

#include "panels.h"

namespace sluice {

constexpr int64_t DEPTH_A_PASS = 1024;               // k at a time: a panel's part stays in the second-level cache,
constexpr int64_t DEPTH_A_TURN = (1 << 12) / PANEL;  // or in the first, if rows are so few that it would be waited for
constexpr int64_t TILES_IN_TURNS = 8;

template <typename Weight>
struct Linear {
  const float* x;  // [M, K], rows x_stride apart
  int64_t x_stride, k;
  const Weight* weight;  // packed
  float norm_eps;        // negative: none; else rows of x are divided by their root mean square
  const float* norm;     // [K] or null: and multiplied by this
  Output to;
};

// Elements of a packed weight [rows, k].
template <typename Weight>
inline int64_t packed_size(int64_t rows, int64_t k, bool gated) {
  return panels_of(rows, gated) * PANEL * k;
}

template <typename Weight>
inline void pack(const Weight* weight, Weight* packed, int64_t rows, int64_t k, bool gated) {
  Pool::instance().run(static_cast<int>(panels_of(rows, gated)), [&](int64_t panel) {
    for (int64_t from = 0; from < k; from += 16)  // a few rows at a time: they stay in the first-level cache
      for (int64_t column = 0; column < PANEL; ++column) {
        const int64_t row = source_row(panel * PANEL + column, rows, gated);
        Weight* to = packed + panel * PANEL * k + column;
        for (int64_t i = from; i < std::min(k, from + 16); ++i)
          to[i * PANEL] = row < 0 ? Weight{} : weight[row * k + i];
      }
  });
}

template <typename Weight>
constexpr int64_t STEP = std::min<int64_t>(LINE, PANEL * sizeof(Weight));  // bytes: a line, or less if one k has less

template <typename Weight>
constexpr int LINES = PANEL * sizeof(Weight) / STEP<Weight>;  // of one k of a panel

// rows ROWS × one panel over k in [0, depth), going on from `sums` [rows, PANEL]. With each k, FETCHED lines from
// `ahead` on are brought into the cache.
template <int ROWS, int FETCHED, typename Weight>
inline void multiply(const float* x, int64_t x_stride, const Weight* panel, int64_t depth, const char* ahead,
                     float* sums) {
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) acc[r][v] = load(sums + r * PANEL + v * LANES);
  for (int64_t i = 0; i < depth; ++i) {
    Vec w[VECS];
    for (int v = 0; v < VECS; ++v) w[v] = load(panel + i * PANEL + v * LANES);
    for (int64_t line = 0; line < FETCHED; ++line) __builtin_prefetch(ahead + (i * FETCHED + line) * STEP<Weight>);
    for (int r = 0; r < ROWS; ++r) {
      const Vec value = broadcast(x[r * x_stride + i]);
      for (int v = 0; v < VECS; ++v) acc[r][v] += value * w[v];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(sums + r * PANEL + v * LANES, acc[r][v]);
}

template <int ROWS, int FETCHED, typename Weight>
inline void multiply_rows(int rows, const float* x, int64_t x_stride, const Weight* panel, int64_t depth,
                          const char* ahead, float* sums) {
  if (rows == ROWS) return multiply<ROWS, FETCHED>(x, x_stride, panel, depth, ahead, sums);
  if constexpr (ROWS > 1) multiply_rows<ROWS - 1, FETCHED>(rows, x, x_stride, panel, depth, ahead, sums);
}

// A panel's part in float32.
inline const float* widened(const float* panel, int64_t) { return panel; }

inline const float* widened(const uint16_t* panel, int64_t depth) {
  static thread_local std::vector<float> part;
  part.resize(DEPTH_A_PASS * PANEL);
  for (int64_t i = 0; i < depth * PANEL; i += LANES) store(part.data() + i, load(panel + i));
  return part.data();
}

// Rows [begin, end) of one panel.
template <typename Weight>
inline void compute_piece(const Linear<Weight>& job, int64_t panel, int64_t begin, int64_t end, const float* scales) {
  alignas(64) float sums[ROWS_A_PIECE * PANEL];  // of which few rows use little
  std::fill_n(sums, (end - begin) * PANEL, 0.0f);
  const Weight* weight = job.weight + panel * PANEL * job.k;
  const int64_t tiles = (end - begin + TILE - 1) / TILE;
  const int64_t a_pass = tiles > 1 && tiles <= TILES_IN_TURNS ? DEPTH_A_TURN : DEPTH_A_PASS;
  for (int64_t from = 0; from < job.k; from += a_pass) {
    const int64_t depth = std::min(a_pass, job.k - from);
    const Weight* narrow = weight + from * PANEL;
    const float* wide = tiles > TILES_WIDENED ? widened(narrow, depth) : nullptr;
    for (int64_t t = 0; t < tiles; ++t) {  // tiles of even height: six and six and one would waste the last
      const int64_t first = (end - begin) * t / tiles, last = (end - begin) * (t + 1) / tiles;
      const float* x = job.x + (begin + first) * job.x_stride + from;
      const int rows = static_cast<int>(last - first);
      float* to = sums + first * PANEL;
      if (tiles == 1) {
        const char* ahead = reinterpret_cast<const char*>(narrow) + AHEAD;
        multiply_rows<TILE, LINES<Weight>>(rows, x, job.x_stride, narrow, depth, ahead, to);
        continue;
      }
      // What lies behind is met next: the first tiles fetch it, a part each, while this one is in the cache.
      const char* behind = reinterpret_cast<const char*>(narrow + depth * PANEL);
      const char* ahead = behind + t % LINES<Weight> * depth * STEP<Weight>;
      if (wide != nullptr) multiply_rows<TILE, 1>(rows, x, job.x_stride, wide, depth, ahead, to);
      else multiply_rows<TILE, 1>(rows, x, job.x_stride, narrow, depth, ahead, to);
    }
  }
  for (int64_t row = begin; row < end; ++row)
    finish_row(job.to, row, panel, load_sums(sums + (row - begin) * PANEL), scales == nullptr ? 1.0f : scales[row]);
}

// Rows of x times the norm's weights, for those that were not folded into the matrix.
template <typename Weight>
inline std::vector<float> weighted(const Linear<Weight>& job) {
  std::vector<float> x(job.to.m * job.k);
  each_row(job.to.m, job.k, [&](int64_t row) {
    for (int64_t i = 0; i < job.k; ++i) x[row * job.k + i] = job.x[row * job.x_stride + i] * job.norm[i];
  });
  return x;
}

template <typename Weight>
inline void run(Linear<Weight> job) {
  std::vector<float> scales, x;
  if (job.norm_eps >= 0.0f) {
    scales.resize(job.to.m);
    each_row(job.to.m, job.k,
             [&](int64_t row) { scales[row] = norm_scale(job.x + row * job.x_stride, job.k, job.norm_eps); });
  }
  if (job.norm != nullptr) {
    x = weighted(job);
    job.x = x.data(), job.x_stride = job.k;
  }
  const float* scale = scales.empty() ? nullptr : scales.data();
  each_piece(job.to, job.k,
             [&](int64_t panel, int64_t begin, int64_t end) { compute_piece(job, panel, begin, end, scale); });
}

}  // namespace sluice
