// x [M, K] times a weight [N, K] of 8 or 4 bits. Inputs share scales in groups of 32: a weight's column has one for
// each group, and rows of x are quantised here to 8 bits with one for each group.
//
//   y[m, n] = Σ_g a[m, g] · (scale[n, g] · Σ_k q[m, k] · level[n, k] + minimum[n, g] · Σ_k q[m, k])
//
// The sums over a group are exact integers and are added in float32 in ascending order of groups, so a row's bits
// depend on nothing but the row. Levels are unsigned. A symmetric weight's minimum is -2^(BITS - 1) · scale: sums then
// begin with that many times the sum of q, and no minima are stored. Layout: [panel][DOT_VECS columns' part][group], of
// which each has levels [quad, two to a byte with 4 bits][column][4], scales float16 [column] and, if there are any,
// minima likewise.
#pragma once

#include "integer_rows.h"
#include "tiles.h"

namespace sluice {

constexpr int PART = DOT_VECS * LANES;  // columns at once
// Groups that all rows of a piece meet before the next ones: so much of a weight stays in the first-level cache.
constexpr int64_t GROUPS_A_PASS = 12;
// Rows that wait for weights rather than for products: tiles of them are high, since each reads the weights.
constexpr int64_t FEW_ROWS = 11;

// Bytes of one group of a part, and of its levels, which come first.
template <int BITS>
constexpr int64_t LEVELS_SIZE = PART * GROUP * BITS / 8;
template <int BITS, bool MINIMA>
constexpr int64_t GROUP_SIZE = LEVELS_SIZE<BITS> + PART * 2 * (MINIMA ? 2 : 1);

template <int BITS, bool MINIMA>
inline int64_t integer_size(int64_t rows, int64_t k, bool gated) {
  return panels_of(rows, gated) * (PANEL / PART) * num_groups(k) * GROUP_SIZE<BITS, MINIMA>;
}

// A weight as it comes: levels [rows, k] and for each row and group a scale and a minimum, of float16.
struct Quantised {
  const uint8_t* levels;
  const uint16_t *scales, *minima;
  int64_t rows, k;
  bool gated;
};

// One column of a part's group.
template <int BITS, bool MINIMA>
inline void pack_column(const Quantised& weight, int64_t row, int64_t group, int64_t column, uint8_t* to) {
  for (int64_t i = group * GROUP; i < std::min(weight.k, (group + 1) * GROUP); ++i) {
    const int64_t quad = i % GROUP / 4, within = column * 4 + i % 4;
    const uint8_t level = weight.levels[row * weight.k + i];
    if (BITS == 8) to[quad * PART * 4 + within] = level;
    else to[quad / 2 * PART * 4 + within] |= static_cast<uint8_t>(level << quad % 2 * 4);
  }
  const int64_t from = row * num_groups(weight.k) + group;
  std::memcpy(to + LEVELS_SIZE<BITS> + column * 2, weight.scales + from, 2);
  if (MINIMA) std::memcpy(to + LEVELS_SIZE<BITS> + (PART + column) * 2, weight.minima + from, 2);
}

template <int BITS, bool MINIMA>
inline void pack_integers(const Quantised& weight, uint8_t* packed) {
  const int64_t groups = num_groups(weight.k), size = GROUP_SIZE<BITS, MINIMA>;
  Pool::instance().run(static_cast<int>(panels_of(weight.rows, weight.gated) * PANEL / PART), [&](int64_t part) {
    uint8_t* to = packed + part * groups * size;
    std::memset(to, 0, groups * size);
    for (int64_t column = 0; column < PART; ++column) {
      const int64_t row = source_row(part * PART + column, weight.rows, weight.gated);
      for (int64_t group = 0; row >= 0 && group < groups; ++group)
        pack_column<BITS, MINIMA>(weight, row, group, column, to + group * size);
    }
  });
}

// A part's groups: levels as they lie in the weight, or with 4 bits as bytes of their own, for rows that are many.
struct Source {
  const uint8_t *levels, *scales, *ahead;  // what is brought into the cache meanwhile
  int64_t levels_size, size;               // from one group to the next: of levels, and of the others
};

// Products of one quad, or with nibbles of two.
template <int BITS, bool NIBBLES, int ROWS>
inline void multiply_quads(const typename Dot<BITS>::Quad* x, int64_t x_stride, const uint8_t* levels,
                           typename Dot<BITS>::Sum (&sums)[ROWS][DOT_VECS]) {
  using Weights = typename Dot<BITS>::Weights;
  for (int v = 0; v < DOT_VECS; ++v) {
    const Bytes bytes = load_bytes(levels + v * LANES * 4);
    const Weights first(NIBBLES ? bytes & 0x0f : bytes);
    for (int r = 0; r < ROWS; ++r) sums[r][v].add(first, x[r * x_stride]);
    if constexpr (NIBBLES) {
      const Weights second((Bytes)((Words)bytes >> 4) & 0x0f);
      for (int r = 0; r < ROWS; ++r) sums[r][v].add(second, x[r * x_stride + 1]);
    }
  }
}

// Has lines brought into the second-level cache.
template <int LINES>
inline void fetch_lines(const uint8_t* from) {
  for (int line = 0; line < LINES; ++line) __builtin_prefetch(from + line * LINE, 0, 2);
}

// sums [ROWS, PANEL] += ROWS rows by one part, over so many groups. With each quad, FETCH lines are fetched ahead.
// Loops over registers are unrolled: registers have no index.
template <int BITS, bool MINIMA, bool NIBBLES, int FETCH, int ROWS>
inline void multiply_part(const Activations<BITS>& x, Source weight, int64_t groups, float* sums) {
  constexpr int STEP = NIBBLES ? 2 : 1;
  constexpr bool IS_KEPT = ROWS <= KEPT_ROWS;
  const int64_t stride = x.groups;
  const float *scales = x.scales, *totals = x.totals;
  const int32_t* starts = x.starts;
  Vec kept[ROWS][DOT_VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; IS_KEPT && v < DOT_VECS; ++v) kept[r][v] = load(sums + r * PANEL + v * LANES);
  for (int64_t group = 0; group < groups; ++group) {
    const auto start = [&](int r) { return MINIMA ? 0 : starts[r * stride]; };
    typename Dot<BITS>::Sum acc[ROWS][DOT_VECS];
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < DOT_VECS; ++v) acc[r][v].begin(start(r));
    for (int q = 0; q < GROUP_QUADS; q += STEP) {
      fetch_lines<FETCH * STEP>(weight.ahead + q * FETCH * LINE);
      multiply_quads<BITS, NIBBLES>(x.quads + group * GROUP_QUADS + q, x.stride, weight.levels + q * PART * 4 / STEP,
                                    acc);
    }
#pragma GCC unroll 4
    for (int v = 0; v < DOT_VECS; ++v) {
      const Vec scale = load_half(weight.scales + v * LANES * 2);
      Vec minimum;
      if (MINIMA) minimum = load_half(weight.scales + (PART + v * LANES) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        float* sum = sums + r * PANEL + v * LANES;
        Vec value = IS_KEPT ? kept[r][v] : load(sum);
        value += __builtin_convertvector(acc[r][v].all(start(r)), Vec) * (scale * scales[r * stride]);
        if (MINIMA) value += minimum * totals[r * stride];
        if (IS_KEPT) kept[r][v] = value;
        else store(sum, value);
      }
    }
    asm volatile("" : : : "memory");  // GCC 12 would carry the sums to the next group through the stack as well
    ++scales, ++totals, ++starts;
    weight.levels += weight.levels_size, weight.scales += weight.size, weight.ahead += weight.size;
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; IS_KEPT && v < DOT_VECS; ++v) store(sums + r * PANEL + v * LANES, kept[r][v]);
}

template <int BITS, bool MINIMA, bool NIBBLES, int FETCH, int ROWS = DOT_ROWS>
inline void multiply_rows(int64_t rows, const Activations<BITS>& x, const Source& weight, int64_t groups, float* sums) {
  if (rows == ROWS) return multiply_part<BITS, MINIMA, NIBBLES, FETCH, ROWS>(x, weight, groups, sums);
  if constexpr (ROWS > 1) multiply_rows<BITS, MINIMA, NIBBLES, FETCH, ROWS - 1>(rows, x, weight, groups, sums);
}

// Levels of 4 bits of so many groups, `size` bytes apart, as bytes.
inline void widen_nibbles(const uint8_t* from, int64_t size, int64_t groups, uint8_t* to) {
  for (int64_t group = 0; group < groups; ++group, from += size)
    for (int64_t pair = 0; pair < GROUP_QUADS / 2; ++pair, to += 2 * PART * 4)
      for (int64_t at = 0; at < PART * 4; at += LANES * 4) {
        const Bytes bytes = load_bytes(from + pair * PART * 4 + at);
        store_bytes(to + at, bytes & 0x0f);
        store_bytes(to + PART * 4 + at, (Bytes)((Words)bytes >> 4) & 0x0f);
      }
}

// Lines of a group that are fetched with each of its quads: all of them, by a single tile; half as many, by two of two
// or three tiles; or one, by the first of many.
template <int BITS, bool MINIMA>
constexpr int LINES_A_QUAD = (GROUP_SIZE<BITS, MINIMA> / LINE + GROUP_QUADS - 1) / GROUP_QUADS;
template <int BITS, bool MINIMA>
constexpr int HALF_A_QUAD = (LINES_A_QUAD<BITS, MINIMA> + 1) / 2;

// What multiplies tile `t` of so many.
template <int BITS, bool MINIMA>
inline auto tile_product(int64_t t, int64_t tiles) {
  constexpr int ALL = LINES_A_QUAD<BITS, MINIMA>, HALF = HALF_A_QUAD<BITS, MINIMA>;
  if (tiles == 1) return multiply_rows<BITS, MINIMA, BITS == 4, ALL>;
  if (tiles <= TILES_WIDENED) return multiply_rows<BITS, MINIMA, BITS == 4, HALF>;
  if (tiles == 3 && t < 2) return multiply_rows<BITS, MINIMA, false, HALF>;
  if (tiles > 3 && t < ALL) return multiply_rows<BITS, MINIMA, false, 1>;
  return multiply_rows<BITS, MINIMA, false, 0>;
}

// sums [rows, PANEL] += so many rows by one part, over so many groups that stay in the cache. What lies behind these is
// met next and fetched meanwhile.
template <int BITS, bool MINIMA>
inline void multiply_pass(const Activations<BITS>& x, int64_t rows, const uint8_t* weight, int64_t groups,
                          float* sums) {
  constexpr int64_t SIZE = GROUP_SIZE<BITS, MINIMA>;
  const int64_t most = KEPT_ROWS > 0 && rows > FEW_ROWS ? KEPT_ROWS : DOT_ROWS;
  const int64_t tiles = (rows + most - 1) / most, lines = tiles < 4 ? HALF_A_QUAD<BITS, MINIMA> : 1;
  const uint8_t* behind = weight + (tiles == 1 ? AHEAD : groups * SIZE);
  Source source{weight, weight + LEVELS_SIZE<BITS>, behind, SIZE, SIZE};
  alignas(64) uint8_t bytes[BITS == 4 ? GROUPS_A_PASS * LEVELS_SIZE<8> : 1];
  if (BITS == 4 && tiles > TILES_WIDENED) {
    widen_nibbles(weight, SIZE, groups, bytes);
    source.levels = bytes, source.levels_size = LEVELS_SIZE<8>;
  }
  for (int64_t t = 0; t < tiles; ++t) {  // tiles of even height: six and six and one would waste the last
    const int64_t first = rows * t / tiles, height = rows * (t + 1) / tiles - first;
    source.ahead = behind + t * lines * GROUP_QUADS * LINE;
    tile_product<BITS, MINIMA>(t, tiles)(height, x.from(first, 0), source, groups, sums + first * PANEL);
  }
}

// Rows [begin, end) of one panel.
template <int BITS, bool MINIMA>
inline void compute_by_dots(const Integer<BITS, MINIMA>& job, const Activations<BITS>& x, int64_t panel, int64_t begin,
                            int64_t end) {
  alignas(64) float sums[ROWS_A_PIECE * PANEL];  // of which few rows use little
  std::fill_n(sums, (end - begin) * PANEL, 0.0f);
  const int64_t groups = num_groups(job.k), a_pass = end - begin > DOT_ROWS ? GROUPS_A_PASS : groups;
  const uint8_t* weight = job.weight + panel * (PANEL / PART) * groups * GROUP_SIZE<BITS, MINIMA>;
  for (int64_t part = 0; part < PANEL / PART; ++part) {
    if (part == PANEL / PART - 1 && end - begin > FEW_ROWS) fetch_results(job.to, begin, end, panel);
    for (int64_t group = 0; group < groups; group += a_pass) {
      const int64_t num = std::min(a_pass, groups - group);
      multiply_pass<BITS, MINIMA>(x.from(begin, group), end - begin, weight, num, sums + part * PART);
      weight += num * GROUP_SIZE<BITS, MINIMA>;
    }
  }
  for (int64_t row = begin; row < end; ++row)
    finish_row(job.to, row, panel, load_sums(sums + (row - begin) * PANEL), x.norms[row]);
}

// Adds a group's integers [rows, PANEL] of one panel, scaled, to sums likewise.
template <int BITS, bool MINIMA>
inline void add_scaled(const Activations<BITS>& x, int64_t rows, const int32_t* words, const uint8_t* scales,
                       float* sums) {
  for (int v = 0; v < VECS; ++v) {
    const Vec scale = load_half(scales + v * LANES * 2);
    Vec minimum;
    if (MINIMA) minimum = load_half(scales + (PANEL + v * LANES) * 2);
    for (int64_t r = 0; r < rows; ++r) {
      IntVec total;
      std::memcpy(&total, words + r * PANEL + v * LANES, sizeof total);
      if (!MINIMA) total += x.starts[r * x.groups];
      float* sum = sums + r * PANEL + v * LANES;
      Vec value = load(sum) + __builtin_convertvector(total, Vec) * (scale * x.scales[r * x.groups]);
      if (MINIMA) value += minimum * x.totals[r * x.groups];
      store(sum, value);
    }
  }
}

// By tiles, a group at a time; the bits are those of dots.
template <int BITS, bool MINIMA>
inline void compute_by_tiles(const Integer<BITS, MINIMA>& job, const Activations<BITS>& x, int64_t panel, int64_t begin,
                             int64_t end) {
  static_assert(!HAS_TILES || PART == PANEL);
  constexpr int64_t SIZE = GROUP_SIZE<BITS, MINIMA>;
  alignas(64) float sums[BLOCK * PANEL];
  alignas(64) int32_t words[BLOCK * PANEL];
  alignas(64) uint8_t bytes[BITS == 4 ? LEVELS_SIZE<8> : 1];
  const int64_t groups = num_groups(job.k);
  Tiles tiles(group_shape(static_cast<int>(std::min<int64_t>(end - begin, BLOCK))), GROUP);
  for (int64_t row = begin; row < end; row += BLOCK) {
    const int rows = static_cast<int>(std::min<int64_t>(end - row, BLOCK));
    if (row > begin && rows < BLOCK) tiles.shape(group_shape(rows), GROUP);
    std::fill_n(sums, rows * PANEL, 0.0f);
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* weight = job.weight + (panel * groups + group) * SIZE;
      if (row == begin) fetch_lines<SIZE / LINE>(weight + GROUPS_A_PASS * SIZE);
      if (BITS == 4) widen_nibbles(weight, SIZE, 1, bytes);
      const Activations<BITS> seen = x.from(row, group);
      multiply_group(seen.quads, x.stride * 4, rows, BITS == 4 ? bytes : weight, words);
      add_scaled<BITS, MINIMA>(seen, rows, words, weight + LEVELS_SIZE<BITS>, sums);
      if (group < rows) fetch_results(job.to, row + group, panel);
    }
    for (int64_t r = 0; r < rows; ++r)
      finish_row(job.to, row + r, panel, load_sums(sums + r * PANEL), x.norms[row + r]);
  }
}

// Rows [begin, end) of one panel.
template <int BITS, bool MINIMA>
inline void compute_piece(const Integer<BITS, MINIMA>& job, const Activations<BITS>& x, int64_t panel, int64_t begin,
                          int64_t end) {
  if constexpr (HAS_TILES)
    if (end - begin > DOT_ROWS) return compute_by_tiles(job, x, panel, begin, end);  // fewer are not worth a tile
  compute_by_dots(job, x, panel, begin, end);
}

template <int BITS, bool MINIMA>
inline void run(const Integer<BITS, MINIMA>& job) {
  const Activations<BITS> x = activations_for(job);
  each_row(job.to.m, job.k, [&](int64_t row) { quantise_row(job, row, x); });
  each_piece(job.to, job.k,
             [&](int64_t panel, int64_t begin, int64_t end) { compute_piece(job, x, panel, begin, end); });
}

}  // namespace sluice
