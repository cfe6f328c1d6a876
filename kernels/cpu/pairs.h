// x [M, K] times a packed weight [N, K] of bfloat16, x rounded to bfloat16 as well: for processors that multiply such
// numbers, two by two (AVX-512 BF16) or by tiles. Elsewhere linear.h widens the weight.
//
// Products and sums are exact to float32, and of one order for each output, whatever M: a row's bits depend on nothing
// but the row. Layout: [panel][pair of k][column][2].
#pragma once

#include "linear.h"
#include "tiles.h"

namespace sluice {

#if defined(__AVX512BF16__)

// Pairs of a row, padded with zeros.
inline int64_t num_pairs(int64_t k) { return ((k + 1) / 2 + WORDS_A_STEP - 1) / WORDS_A_STEP * WORDS_A_STEP; }

template <>
inline int64_t packed_size<uint16_t>(int64_t rows, int64_t k, bool gated) {
  return panels_of(rows, gated) * PANEL * num_pairs(k) * 2;
}

template <>
inline void pack(const uint16_t* weight, uint16_t* packed, int64_t rows, int64_t k, bool gated) {
  const int64_t size = PANEL * num_pairs(k) * 2;
  Pool::instance().run(static_cast<int>(panels_of(rows, gated)), [&](int64_t panel) {
    uint16_t* to = packed + panel * size;
    std::fill_n(to, size, uint16_t{0});
    for (int64_t from = 0; from < k; from += 16)  // a few rows at a time: they stay in the first-level cache
      for (int64_t column = 0; column < PANEL; ++column) {
        const int64_t row = source_row(panel * PANEL + column, rows, gated);
        for (int64_t i = from; row >= 0 && i < std::min(k, from + 16); ++i)
          to[(i / 2 * PANEL + column) * 2 + i % 2] = weight[row * k + i];
      }
  });
}

inline int64_t pairs_stride(int64_t k) { return row_stride(num_pairs(k)); }

inline void round_row(const Linear<uint16_t>& job, int64_t row, uint16_t* to) {
  const float* x = job.x + row * job.x_stride;
  for (int64_t i = 0; i < pairs_stride(job.k) * 2; i += LANES) {
    const auto mask = static_cast<__mmask16>(job.k - i >= LANES ? 0xffff : (1 << std::max<int64_t>(0, job.k - i)) - 1);
    Vec value = (Vec)_mm512_maskz_loadu_ps(mask, x + i);
    __builtin_prefetch(x + job.x_stride + i);  // of the next row, that may lie in another core's cache
    if (job.norm != nullptr) value *= (Vec)_mm512_maskz_loadu_ps(mask, job.norm + i);
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to + i, &rounded, sizeof rounded);
  }
}

constexpr int64_t PAIRS_A_PASS = 512;     // that all rows meet before the next: they stay in the second-level cache,
constexpr int64_t PAIRS_A_TURN = 64;      // or in the first, if rows are so few that what they read is waited for
constexpr int64_t TILES_FETCHING = VECS;  // fetch a line with each pair what is met next; later ones are free for else

// sums [ROWS, PANEL] += rows of x, `x_stride` words apart, by so many pairs of a panel. With each pair, FETCHED lines
// from `ahead` on are brought into the second-level cache.
template <int ROWS, int FETCHED>
inline void multiply_pairs(const uint32_t* x, int64_t x_stride, const uint8_t* weight, int64_t pairs,
                           const uint8_t* ahead, float* sums) {
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) acc[r][v] = load(sums + r * PANEL + v * LANES);
  for (int64_t i = 0; i < pairs; ++i, weight += PITCH, ahead += FETCHED * LINE) {
    __m512bh w[VECS];
    for (int v = 0; v < VECS; ++v) std::memcpy(&w[v], weight + v * LINE, LINE);
    for (int line = 0; line < FETCHED; ++line) __builtin_prefetch(ahead + line * LINE, 0, 2);
    for (int r = 0; r < ROWS; ++r) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r * x_stride + i]));
      for (int v = 0; v < VECS; ++v) acc[r][v] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][v], pair, w[v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(sums + r * PANEL + v * LANES, acc[r][v]);
}

template <int FETCHED, int ROWS = TILE>
inline void multiply_pairs(int64_t rows, const uint32_t* x, int64_t x_stride, const uint8_t* weight, int64_t pairs,
                           const uint8_t* ahead, float* sums) {
  if (rows == ROWS) return multiply_pairs<ROWS, FETCHED>(x, x_stride, weight, pairs, ahead, sums);
  if constexpr (ROWS > 1) multiply_pairs<FETCHED, ROWS - 1>(rows, x, x_stride, weight, pairs, ahead, sums);
}

// The same, while lines that are read after the whole product are fetched, as far as there are some.
inline void multiply_fetching(int64_t rows, const uint32_t* x, int64_t x_stride, const uint8_t* weight, int64_t pairs,
                              Fetching& later, float* sums) {
  while (pairs > 0) {
    const Lines lines = later.take(pairs);
    if (lines.num == 0) return multiply_pairs<0>(rows, x, x_stride, weight, pairs, weight, sums);
    multiply_pairs<1>(rows, x, x_stride, weight, lines.num, lines.first, sums);
    x += lines.num, weight += lines.num * PITCH, pairs -= lines.num;
  }
}

// sums [rows, PANEL] += so many rows of x by so many pairs of a panel, that stay in a cache. What lies behind these is
// met next, and fetched meanwhile: all of it by a single tile, half of it each by two of three, or a line by each of
// four. Tiles behind them fetch what is read later.
inline void multiply_pass(const uint32_t* x, int64_t x_stride, int64_t rows, const uint8_t* weight, int64_t pairs,
                          Fetching& later, float* sums) {
  const int64_t tiles = (rows + TILE - 1) / TILE, lines = tiles < TILES_FETCHING ? VECS / 2 : 1;
  const uint8_t* behind = weight + (tiles == 1 ? AHEAD : pairs * PITCH);
  for (int64_t t = 0; t < tiles; ++t) {  // tiles of even height: six and six and one would waste the last
    const int64_t first = rows * t / tiles, height = rows * (t + 1) / tiles - first;
    const uint8_t* ahead = behind + t * lines * pairs * LINE;
    const uint32_t* own = x + first * x_stride;
    float* to = sums + first * PANEL;
    if (t * lines >= VECS) multiply_fetching(height, own, x_stride, weight, pairs, later, to);
    else if (tiles == 1) multiply_pairs<VECS>(height, own, x_stride, weight, pairs, ahead, to);
    else if (lines > 1) multiply_pairs<VECS / 2>(height, own, x_stride, weight, pairs, ahead, to);
    else multiply_pairs<1>(height, own, x_stride, weight, pairs, ahead, to);
  }
}

// Rows [begin, end) of one panel.
inline void compute_piece(const Linear<uint16_t>& job, const uint32_t* x, int64_t panel, int64_t begin, int64_t end,
                          const float* scales) {
  const int64_t pairs = num_pairs(job.k), stride = pairs_stride(job.k), rows = end - begin;
  const auto* weight = reinterpret_cast<const uint8_t*>(job.weight) + panel * PITCH * pairs;
  const auto finish = [&](int64_t row, const float* sums) {
    finish_row(job.to, row, panel, load_sums(sums), scales == nullptr ? 1.0f : scales[row]);
  };
  if constexpr (HAS_TILES) {
    const auto fetch = [&](int64_t row) { fetch_results(job.to, row, panel); };
    multiply_tiles<BFloat16s>(x, stride * 4, begin, end, weight, pairs / TILE_ROWS, fetch, finish);
  } else {
    alignas(64) float sums[ROWS_A_PIECE * PANEL];  // of which few rows use little
    std::fill_n(sums, rows * PANEL, 0.0f);
    Fetching later(job.to, panel, begin);
    for (int64_t row = begin; row < end; ++row) fetch_added(job.to, row, panel);
    const bool is_few = rows <= (TILES_FETCHING - 1) * TILE;
    const int64_t a_pass = rows <= TILE ? pairs : is_few ? PAIRS_A_TURN : PAIRS_A_PASS;
    for (int64_t pair = 0; pair < pairs; pair += a_pass) {
      if (!is_few && pair + a_pass >= pairs) fetch_results(job.to, begin, end, panel);
      multiply_pass(x + begin * stride + pair, stride, rows, weight + pair * PITCH, std::min(a_pass, pairs - pair),
                    later, sums);
    }
    for (int64_t row = begin; row < end; ++row) finish(row, sums + (row - begin) * PANEL);
  }
}

template <>
inline void run(Linear<uint16_t> job) {
  static thread_local Workspace<uint32_t> words;
  static thread_local Workspace<float> norms;
  const int64_t stride = pairs_stride(job.k), m = job.to.m;
  uint32_t* x = words.fit(m * stride);
  float* scales = job.norm_eps < 0.0f ? nullptr : norms.fit(m);
  each_row(m, job.k, [&](int64_t row) {
    if (scales != nullptr) scales[row] = norm_scale(job.x + row * job.x_stride, job.k, job.norm_eps);
    round_row(job, row, reinterpret_cast<uint16_t*>(x + row * stride));
  });
  each_piece(job.to, job.k,
             [&](int64_t panel, int64_t begin, int64_t end) { compute_piece(job, x, panel, begin, end, scales); });
}

#endif

}  // namespace sluice
