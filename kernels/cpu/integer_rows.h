// Rows of activations as integers of 8 bits, with a scale for each group of 32 inputs: what integer.h multiplies by a
// weight. A row's integers depend on nothing but the row.
#pragma once

#include <limits>

#include "dot.h"
#include "tiles.h"

namespace sluice {

constexpr int LEVELS = 127;             // of a quantised activation, to either side
constexpr int GROUP = 32;               // inputs that share scales
constexpr int GROUP_QUADS = GROUP / 4;  // of them

template <int BITS, bool MINIMA>
struct Integer {
  const float* x;  // [M, K], rows x_stride apart
  int64_t x_stride, k;
  const uint8_t* weight;  // packed
  float norm_eps;         // negative: none; else rows of x are divided by their root mean square
  const float* norm;      // [K] or null: and multiplied by this
  Output to;
};

inline int64_t num_groups(int64_t k) { return (k + GROUP - 1) / GROUP; }

// A step's activations as integers, rows `stride` quads or `groups` groups apart: x = scale · integer.
template <int BITS>
struct Activations {
  using Quad = typename Dot<BITS>::Quad;
  Quad* quads;
  int64_t stride, groups;
  float* scales;    // NaN in a group that holds one
  int32_t* starts;  // what a symmetric weight's sums begin with
  float* totals;    // sums of the integers, scaled: what minima are multiplied by
  float* norms;     // [M]

  // From a row and group on.
  Activations from(int64_t row, int64_t group) const {
    const int64_t at = row * groups + group;
    return {
        quads + row * stride + group * GROUP_QUADS, stride, groups, scales + at, starts + at, totals + at, norms + row};
  }
};

template <int BITS, bool MINIMA>
inline Activations<BITS> activations_for(const Integer<BITS, MINIMA>& job) {
  static thread_local Workspace<typename Dot<BITS>::Quad> quads;
  static thread_local Workspace<float> scales, totals, norms;
  static thread_local Workspace<int32_t> starts;
  const int64_t m = job.to.m, groups = (num_groups(job.k) + LANES - 1) / LANES * LANES;
  const int64_t stride = row_stride(groups * GROUP_QUADS), all = m * groups;
  return {quads.fit(m * stride), stride, groups, scales.fit(all), starts.fit(all), totals.fit(all), norms.fit(m)};
}

// The numbers of a row of x, normed but for their root mean square, which is a factor of the whole row, and zeros up to
// `width`.
template <int BITS, bool MINIMA>
inline const float* numbers_of(const Integer<BITS, MINIMA>& job, int64_t row, int64_t width) {
  static thread_local Workspace<float> workspace;
  float* x = workspace.fit(width);
  const float* from = job.x + row * job.x_stride;
  if (job.norm == nullptr) std::copy_n(from, job.k, x);
  else
    for (int64_t i = 0; i < job.k; ++i) x[i] = from[i] * job.norm[i];
  std::fill(x + job.k, x + width, 0.0f);
  return x;
}

// Scales and integers of LANES groups of a row, one in each lane. Bits of magnitudes are in order as integers, and
// those of an infinity and a NaN are above all others.
template <int BITS, bool MINIMA>
inline void quantise_groups(const float* x, const Activations<BITS>& to) {
  constexpr int VECTORS = GROUP / LANES, INFINITE = 0x7f800000;
  IntVec lanes[LANES];
  for (int group = 0; group < LANES; ++group) {
    lanes[group] = magnitude_bits(load(x + group * GROUP));
    for (int v = 1; v < VECTORS; ++v)
      lanes[group] = greater(lanes[group], magnitude_bits(load(x + group * GROUP + v * LANES)));
  }
  const IntVec bits = greatests(lanes);
  Vec peak;
  std::memcpy(&peak, &bits, sizeof peak);
  const IntVec broken = bits >= INFINITE;
  const Vec by = peak > std::numeric_limits<float>::min() * LEVELS ? LEVELS / peak : Vec{};
  const Vec scale = broken ? broadcast(std::numeric_limits<float>::quiet_NaN()) : peak / LEVELS;
  float each[LANES];
  store(each, broken ? Vec{} : by);
  for (int group = 0; group < LANES; ++group) {
    lanes[group] = IntVec{};
    for (int v = 0; v < VECTORS; ++v) {
      const IntVec levels = nearest(load(x + group * GROUP + v * LANES) * each[group]);
      lanes[group] += levels;
      store_quads(to.quads + (group * GROUP + v * LANES) / 4, levels);
    }
  }
  const IntVec total = sums(lanes);
  store(to.scales, scale);
  if (MINIMA) store(to.totals, __builtin_convertvector(total, Vec) * scale);
  else store(to.starts, total * -(1 << (BITS - 1)));
}

template <int BITS, bool MINIMA>
inline void quantise_row(const Integer<BITS, MINIMA>& job, int64_t row, const Activations<BITS>& to) {
  const float* x = numbers_of(job, row, to.groups * GROUP);
  to.norms[row] = job.norm_eps < 0.0f ? 1.0f : norm_scale(job.x + row * job.x_stride, job.k, job.norm_eps);
  for (int64_t group = 0; group < to.groups; group += LANES)
    quantise_groups<BITS, MINIMA>(x + group * GROUP, to.from(row, group));
}

}  // namespace sluice
