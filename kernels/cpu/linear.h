// x [M, K] times a packed weight [N, K] transposed, in float32, with what surrounds it in a decoder fused in.
//
// Each output is one chain of fused multiply-adds over k = 0 … K-1, whatever M, the tile it falls into or the thread
// that computes it: a row's bits depend on nothing but the row. The weight lies in panels of PANEL columns,
// [panel][k][column], so that it is read once, in order.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vector.h"

namespace sluice {

#if defined(__AVX512F__)
constexpr int VECS = 4;  // vectors in a panel's row
constexpr int TILE = 6;  // rows of x at once: TILE * VECS accumulators, and the registers that remain for loads
#else
constexpr int VECS = 2;
constexpr int TILE = 4;
#endif
constexpr int PANEL = VECS * LANES;
constexpr int GATES = PANEL / 2;      // of a gated panel: as many columns of the gate, then as many of the other half
constexpr int ROWS_A_PIECE = 16 * TILE;
constexpr int64_t DEPTH_A_PASS = 1024;  // k at a time: a panel's part stays in the second-level cache

enum class Finish { STORE, ADD, GATE };

struct Linear {
  const float* x;        // [M, K], rows x_stride apart
  int64_t x_stride;
  const float* weight;   // packed
  const float* bias;     // [N] or null; with GATE [2 N], the gates' first
  float* y;              // [M, N], contiguous; with ADD it is added to
  int64_t m, n, k;       // with GATE, n counts outputs: the packed weight has 2 n columns
  float norm_eps;        // negative: none; else rows of x are divided by their root mean square
  Finish finish;
};

inline int64_t num_panels(int64_t outputs, bool gated) {
  const int64_t width = gated ? GATES : PANEL;
  return (outputs + width - 1) / width;
}

// Floats of a packed weight [rows, k].
inline int64_t packed_size(int64_t rows, int64_t k, bool gated) {
  return num_panels(gated ? rows / 2 : rows, gated) * PANEL * k;
}

// Source row of a packed column, or -1 for padding. Gated: a gate and its partner share a panel.
inline int64_t source_row(int64_t column, int64_t rows, bool gated) {
  if (!gated) return column < rows ? column : -1;
  const int64_t half = rows / 2, gate = column / PANEL * GATES + column % GATES;
  if (gate >= half) return -1;
  return column % PANEL < GATES ? gate : half + gate;
}

inline void pack(const float* weight, float* packed, int64_t rows, int64_t k, bool gated) {
  const int64_t panels = packed_size(rows, k, gated) / (PANEL * k);
  Pool::instance().run(static_cast<int>(panels), [&](int64_t panel) {
    for (int64_t from = 0; from < k; from += 16)  // a few rows at a time: they stay in the first-level cache
      for (int64_t column = 0; column < PANEL; ++column) {
        const int64_t row = source_row(panel * PANEL + column, rows, gated);
        float* to = packed + panel * PANEL * k + column;
        for (int64_t i = from; i < std::min(k, from + 16); ++i) to[i * PANEL] = row < 0 ? 0.0f : weight[row * k + i];
      }
  });
}

// rows ROWS × one panel over k in [0, depth), going on from `sums` [rows, PANEL].
template <int ROWS>
inline void multiply(const float* x, int64_t x_stride, const float* panel, int64_t depth, float* sums) {
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) acc[r][v] = load(sums + r * PANEL + v * LANES);
  for (int64_t i = 0; i < depth; ++i) {
    Vec w[VECS];
    for (int v = 0; v < VECS; ++v) w[v] = load(panel + i * PANEL + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Vec value = broadcast(x[r * x_stride + i]);
      for (int v = 0; v < VECS; ++v) acc[r][v] += value * w[v];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(sums + r * PANEL + v * LANES, acc[r][v]);
}

template <int ROWS>
inline void multiply_rows(int rows, const float* x, int64_t x_stride, const float* panel, int64_t depth, float* sums) {
  if (rows == ROWS) return multiply<ROWS>(x, x_stride, panel, depth, sums);
  if constexpr (ROWS > 1) multiply_rows<ROWS - 1>(rows, x, x_stride, panel, depth, sums);
}

// Writes one row's sums of one panel to where they belong.
inline void finish_row(const Linear& job, int64_t row, int64_t panel, const float* sums, float scale) {
  if (job.finish == Finish::GATE) {
    const int64_t first = panel * GATES, count = std::min<int64_t>(GATES, job.n - first);
    float out[GATES];
    for (int i = 0; i < GATES; i += LANES) {
      Vec gate = load(sums + i) * scale, up = load(sums + GATES + i) * scale;
      for (int j = 0; job.bias != nullptr && j < LANES && first + i + j < job.n; ++j) {
        gate[j] += job.bias[first + i + j];
        up[j] += job.bias[job.n + first + i + j];
      }
      store(out + i, gate / (1.0f + exp(-gate)) * up);
    }
    std::memcpy(job.y + row * job.n + first, out, count * sizeof(float));
    return;
  }
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, job.n - first);
  float* y = job.y + row * job.n + first;
  for (int64_t i = 0; i < count; ++i) {
    const float value = sums[i] * scale + (job.bias == nullptr ? 0.0f : job.bias[first + i]);
    y[i] = job.finish == Finish::ADD ? y[i] + value : value;
  }
}

// Rows [begin, end) of one panel.
inline void compute_piece(const Linear& job, int64_t panel, int64_t begin, int64_t end, const float* scales) {
  alignas(64) float sums[ROWS_A_PIECE * PANEL] = {};
  const float* weight = job.weight + panel * PANEL * job.k;
  const int64_t tiles = (end - begin + TILE - 1) / TILE;
  for (int64_t from = 0; from < job.k; from += DEPTH_A_PASS) {
    const int64_t depth = std::min(DEPTH_A_PASS, job.k - from);
    for (int64_t t = 0; t < tiles; ++t) {  // tiles of even height: six and six and one would waste the last
      const int64_t first = (end - begin) * t / tiles, last = (end - begin) * (t + 1) / tiles;
      const float* x = job.x + (begin + first) * job.x_stride + from;
      const int rows = static_cast<int>(last - first);
      multiply_rows<TILE>(rows, x, job.x_stride, weight + from * PANEL, depth, sums + first * PANEL);
    }
  }
  for (int64_t row = begin; row < end; ++row)
    finish_row(job, row, panel, sums + (row - begin) * PANEL, scales == nullptr ? 1.0f : scales[row]);
}

inline float norm_scale(const float* x, int64_t k, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < k; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(k) + eps);
}

inline void run(const Linear& job) {
  Pool& pool = Pool::instance();
  std::vector<float> scales;
  if (job.norm_eps >= 0.0f) {
    scales.resize(job.m);
    const auto scale = [&](int64_t row) { scales[row] = norm_scale(job.x + row * job.x_stride, job.k, job.norm_eps); };
    const int pieces = static_cast<int>(job.m * job.k <= SMALL ? 1 : std::min<int64_t>(job.m, 2 * pool.threads()));
    pool.run(pieces, [&](int piece) {
      for (int64_t row = job.m * piece / pieces; row < job.m * (piece + 1) / pieces; ++row) scale(row);
    });
  }
  const float* scale = scales.empty() ? nullptr : scales.data();
  const int64_t panels = num_panels(job.n, job.finish == Finish::GATE);
  const int64_t groups = (job.m + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
  const auto piece = [&](int64_t at) {
    const int64_t group = at % groups;
    compute_piece(job, at / groups, job.m * group / groups, job.m * (group + 1) / groups, scale);
  };
  if (job.m * job.k * panels * PANEL <= SMALL) {
    for (int64_t at = 0; at < panels * groups; ++at) piece(at);
  } else {
    pool.run(static_cast<int>(panels * groups), piece);
  }
}

}  // namespace sluice
