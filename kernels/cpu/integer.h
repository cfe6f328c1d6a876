// x [M, K] times a weight [N, K] of 8 or 4 bits. Rows of x are quantised here to 8 bits with a scale each; the products
// are exact integers, so a row's bits depend on nothing but the row.
//
// Weights are unsigned with their zero at 2^(BITS - 1): what that adds is the zero times the sum of the row's integers,
// one number a row and group, taken off at the end. A scale belongs to a column and a group of inputs. Input columns
// named as outliers are left out of the integers (their weights there are zero) and multiplied in float32.
// Layout: [panel][DOT_VECS columns' part][quads, two to a byte with 4 bits][column][4].
#pragma once

#include <limits>

#include "dot.h"
#include "tiles.h"

namespace sluice {

constexpr int LEVELS = 127;             // of a quantised activation, to either side
constexpr int GROUP_QUADS = 32;         // with 4 bits: 128 inputs share a scale
constexpr int PART = DOT_VECS * LANES;  // columns at once

template <int BITS>
struct Integer {
  const float* x;  // [M, K], rows x_stride apart
  int64_t x_stride, k;
  const uint8_t* weight;    // packed
  const float* scales;      // packed [panel][group][column]
  const int64_t* outliers;  // [num_outliers] input columns, ascending
  int64_t num_outliers;
  const float* outlier_weights;  // packed [panel][outlier][column]
  float norm_eps;                // negative: none; else rows of x are divided by their root mean square
  Output to;
};

// Quads of a row: K rounded up; with 4 bits to two quads, which share a byte.
template <int BITS>
inline int64_t num_quads(int64_t k) {
  return BITS == 8 ? ((k + 3) / 4 + WORDS_A_STEP - 1) / WORDS_A_STEP * WORDS_A_STEP : (k + 7) / 8 * 2;
}

template <int BITS>
inline int64_t num_groups(int64_t k) {
  return BITS == 8 ? 1 : (num_quads<4>(k) + GROUP_QUADS - 1) / GROUP_QUADS;
}

template <int BITS>
inline int64_t integer_size(int64_t rows, int64_t k, bool gated) {
  return panels_of(rows, gated) * PANEL * num_quads<BITS>(k) * BITS / 2;
}

// levels: uint8 [rows, k].
template <int BITS>
inline void pack_levels(const uint8_t* levels, uint8_t* packed, int64_t rows, int64_t k, bool gated) {
  const int64_t quads = num_quads<BITS>(k), part_size = PART * quads * BITS / 2;
  Pool::instance().run(static_cast<int>(panels_of(rows, gated) * PANEL / PART), [&](int64_t part) {
    uint8_t* to = packed + part * part_size;
    std::memset(to, 0, part_size);
    for (int64_t column = 0; column < PART; ++column) {
      const int64_t row = source_row(part * PART + column, rows, gated);
      for (int64_t i = 0; row >= 0 && i < k; ++i) {
        const int64_t quad = i / 4, within = column * 4 + i % 4;
        if (BITS == 8) to[quad * PART * 4 + within] = levels[row * k + i];
        else to[quad / 2 * PART * 4 + within] |= static_cast<uint8_t>(levels[row * k + i] << quad % 2 * 4);
      }
    }
  });
}

// A step's activations as integers.
template <int BITS>
struct Activations {
  typename Dot<BITS>::Quad* quads;  // [M, quads, padded]
  int32_t* zeros;                   // [M, groups] sums of the integers times the weights' zero
  float *scales, *norms;            // [M]: x = scale · integer; NaN for a row that holds one
};

// Quads from one row to the next.
template <int BITS>
inline int64_t quads_stride(int64_t k) {
  return row_stride(num_quads<BITS>(k));
}

template <int BITS>
inline Activations<BITS> activations_for(const Integer<BITS>& job) {
  static thread_local Workspace<typename Dot<BITS>::Quad> quads;
  static thread_local Workspace<int32_t> zeros;
  static thread_local Workspace<float> scales, norms;
  const int64_t m = job.to.m;
  return {quads.fit(m * quads_stride<BITS>(job.k)), zeros.fit(m * num_groups<BITS>(job.k)), scales.fit(m),
          norms.fit(m)};
}

template <int BITS>
inline void quantise_row(const Integer<BITS>& job, int64_t row, const Activations<BITS>& to) {
  const int64_t width = quads_stride<BITS>(job.k) * 4, groups = num_groups<BITS>(job.k);
  static thread_local Workspace<float> workspace;
  float* x = workspace.fit(width);
  std::copy_n(job.x + row * job.x_stride, job.k, x);
  std::fill(x + job.k, x + width, 0.0f);
  to.norms[row] = job.norm_eps < 0.0f ? 1.0f : norm_scale(x, job.k, job.norm_eps);
  for (int64_t i = 0; i < job.num_outliers; ++i) x[job.outliers[i]] = 0.0f;
  Vec most{}, odd{};
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec v = load(x + i);
    most = greater(most, absolute(v));
    odd += v * 0.0f;  // not 0 if there is an infinity or a NaN
  }
  const float peak = greatest(most);
  const bool broken = sum(odd) != 0.0f;
  const float by = peak > std::numeric_limits<float>::min() * LEVELS && !broken ? LEVELS / peak : 0.0f;
  to.scales[row] = broken ? std::numeric_limits<float>::quiet_NaN() : peak / LEVELS;
  typename Dot<BITS>::Quad* quads = to.quads + row * width / 4;
  const int64_t each = BITS == 8 ? width : GROUP_QUADS * 4;
  for (int64_t group = 0; group < groups; ++group) {
    IntVec total{};
    for (int64_t i = group * each; i < std::min(width, (group + 1) * each); i += LANES) {
      const IntVec levels = nearest(load(x + i) * by);
      total += levels;
      store_quads(quads + i / 4, levels);
    }
    int32_t lanes[LANES], zeros = 0;
    std::memcpy(lanes, &total, sizeof lanes);
    for (const int32_t lane : lanes) zeros += lane;
    to.zeros[row * groups + group] = zeros * (1 << (BITS - 1));
  }
}

// sums [ROWS, PANEL] += ROWS rows × DOT_VECS vectors of columns over one group of `quads` quads.
template <int BITS, int ROWS>
inline void multiply_group(const typename Dot<BITS>::Quad* x, int64_t x_stride, const uint8_t* weight, int64_t quads,
                           const int32_t* zeros, int64_t zeros_stride, const float* scales, float* sums) {
  using Weights = typename Dot<BITS>::Weights;
  typename Dot<BITS>::Sum acc[ROWS][DOT_VECS];
  for (int64_t from = 0; from < quads; from += Dot<BITS>::RUN) {
    for (int64_t q = from; q < std::min<int64_t>(quads, from + Dot<BITS>::RUN); q += 8 / BITS) {
      for (int v = 0; v < DOT_VECS; ++v) {
        const Bytes bytes = load_bytes(weight + (v * LANES) * 4);
        fetch_ahead(weight + (v * LANES) * 4);
        const Weights first(BITS == 8 ? bytes : bytes & 0x0f);
        for (int r = 0; r < ROWS; ++r) acc[r][v].add(first, x[r * x_stride + q]);
        if constexpr (BITS == 4) {
          const Weights second((Bytes)((Words)bytes >> 4) & 0x0f);
          for (int r = 0; r < ROWS; ++r) acc[r][v].add(second, x[r * x_stride + q + 1]);
        }
      }
      weight += PART * 4;
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < DOT_VECS; ++v) acc[r][v].fold();
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < DOT_VECS; ++v) {
      const Vec product = __builtin_convertvector(acc[r][v].total - zeros[r * zeros_stride], Vec);
      float* sum = sums + r * PANEL + v * LANES;
      store(sum, load(sum) + product * load(scales + v * LANES));
    }
}

template <int BITS, int ROWS>
inline void multiply_integers(int rows, const typename Dot<BITS>::Quad* x, int64_t x_stride, const uint8_t* weight,
                              int64_t quads, const int32_t* zeros, int64_t zeros_stride, const float* scales,
                              float* sums) {
  if (rows == ROWS) return multiply_group<BITS, ROWS>(x, x_stride, weight, quads, zeros, zeros_stride, scales, sums);
  if constexpr (ROWS > 1)
    multiply_integers<BITS, ROWS - 1>(rows, x, x_stride, weight, quads, zeros, zeros_stride, scales, sums);
}

// What becomes of one row's integers' sums of a panel, scaled by its columns: they are scaled by the row, and its
// outliers are added.
template <int BITS>
inline void finish_integers(const Integer<BITS>& job, const Activations<BITS>& x, int64_t panel, int64_t row,
                            Sums sums) {
  const float* values = job.x + row * job.x_stride;
  const float* weight = job.outlier_weights + panel * job.num_outliers * PANEL;
  for (int v = 0; v < VECS; ++v) {
    sums.at[v] *= x.scales[row];
    for (int64_t i = 0; i < job.num_outliers; ++i)
      sums.at[v] += values[job.outliers[i]] * load(weight + i * PANEL + v * LANES);
  }
  finish_row(job.to, row, panel, sums, x.norms[row]);
}

// sums [end - begin, PANEL] of rows [begin, end) by one panel, scaled by its columns.
template <int BITS>
inline void multiply_by_dots(const Integer<BITS>& job, const Activations<BITS>& x, int64_t panel, int64_t begin,
                             int64_t end, float* sums) {
  std::fill_n(sums, (end - begin) * PANEL, 0.0f);
  const int64_t quads = num_quads<BITS>(job.k), groups = num_groups<BITS>(job.k), stride = quads_stride<BITS>(job.k);
  const int64_t each = BITS == 8 ? quads : GROUP_QUADS, tiles = (end - begin + DOT_ROWS - 1) / DOT_ROWS;
  for (int64_t part = 0; part < PANEL / PART; ++part) {
    const uint8_t* weight = job.weight + (panel * PANEL / PART + part) * PART * quads * BITS / 2;
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = begin + (end - begin) * t / tiles, last = begin + (end - begin) * (t + 1) / tiles;
        multiply_integers<BITS, DOT_ROWS>(static_cast<int>(last - first), x.quads + first * stride + group * each,
                                          stride, weight + group * each * PART * BITS / 2,
                                          std::min(each, quads - group * each), x.zeros + first * groups + group,
                                          groups, job.scales + (panel * groups + group) * PANEL + part * PART,
                                          sums + (first - begin) * PANEL + part * PART);
      }
  }
}

template <int BITS>
inline void compute_by_dots(const Integer<BITS>& job, const Activations<BITS>& x, int64_t panel, int64_t begin,
                            int64_t end) {
  alignas(64) float sums[ROWS_A_PIECE * PANEL];  // of which few rows use little
  multiply_by_dots(job, x, panel, begin, end, sums);
  for (int64_t row = begin; row < end; ++row)
    finish_integers(job, x, panel, row, load_sums(sums + (row - begin) * PANEL));
}

// Integers of one row and panel, of which the zeros' share is taken, times what the columns are worth.
inline Sums scaled(const float* words, int32_t zeros, const float* scales) {
  Sums sums;
  for (int v = 0; v < VECS; ++v) {
    IntVec total;
    std::memcpy(&total, words + v * LANES, sizeof total);
    sums.at[v] = __builtin_convertvector(total - zeros, Vec) * load(scales + v * LANES);
  }
  return sums;
}

// By tiles, which have the whole of K as their group; the bits are those of dots.
inline void compute_by_tiles(const Integer<8>& job, const Activations<8>& x, int64_t panel, int64_t begin,
                             int64_t end) {
  const int64_t quads = num_quads<8>(job.k);
  const auto fetch = [&](int64_t row) { fetch_results(job.to, row, panel); };
  const auto finish = [&](int64_t row, const float* words) {
    finish_integers(job, x, panel, row, scaled(words, x.zeros[row], job.scales + panel * PANEL));
  };
  multiply_tiles<SignedByUnsigned>(x.quads, quads_stride<8>(job.k) * 4, begin, end, job.weight + panel * PITCH * quads,
                                   quads / TILE_ROWS, fetch, finish);
}

// Rows [begin, end) of one panel.
template <int BITS>
inline void compute_piece(const Integer<BITS>& job, const Activations<BITS>& x, int64_t panel, int64_t begin,
                          int64_t end) {
  if constexpr (HAS_TILES && BITS == 8)
    if (end - begin > DOT_ROWS) return compute_by_tiles(job, x, panel, begin, end);  // fewer are not worth a tile
  compute_by_dots(job, x, panel, begin, end);
}

template <int BITS>
inline void run(const Integer<BITS>& job) {
  const int64_t m = job.to.m;
  const Activations<BITS> x = activations_for(job);
  each_row(m, job.k, [&](int64_t row) { quantise_row<BITS>(job, row, x); });
  each_piece(job.to, job.k,
             [&](int64_t panel, int64_t begin, int64_t end) { compute_piece<BITS>(job, x, panel, begin, end); });
}

}  // namespace sluice
