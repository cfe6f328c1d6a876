// Products of tiles (Intel AMX): up to 16 rows of x by 16 columns of a weight, a line of 64 bytes of each at a time.
//
// A word is what one column has of a line: four bytes or two numbers of bfloat16, as in panels.h's packed weights. What
// one row computes is the same in any company: rows of a tile do not mix, and words are summed in ascending order.
#pragma once

#include <array>

#include "amx.h"
#include "panels.h"
#include "workspace.h"

namespace sluice {

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE_ROWS = 16;                                // of x, and words of a line
constexpr int BLOCK = 2 * TILE_ROWS;                         // rows of x that share what is read of a weight
constexpr int PITCH = PANEL * 4;                             // bytes from one word of a panel to the next
constexpr int STEP_BYTES = TILE_ROWS * PITCH;                // of a panel that meet a line of x
constexpr int64_t WORDS_A_STEP = HAS_TILES ? TILE_ROWS : 1;  // packed weights and rows of x are padded to whole steps

// The eight tiles of a thread, of so many rows each and a line wide. Given back when this ends: what a thread holds is
// saved whenever it is taken off its core.
class Tiles {
 public:
  explicit Tiles(std::array<int, 8> rows, int depth = LINE) { shape(rows, depth); }

  // A tenth of a microsecond, as long as a dozen products. `depth`: bytes of a row of x.
  void shape(std::array<int, 8> rows, int depth = LINE) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
      shapes.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? depth : LINE);
    }
    load_shapes(shapes);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { release_tiles(); }
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 columns of a weight; where all rows fit into 4, 5 has columns,
// too.
inline std::array<int, 8> shape_of(int rows) {
  if (rows <= TILE_ROWS) return {rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS, TILE_ROWS};
  const int second = rows - TILE_ROWS;
  return {TILE_ROWS, TILE_ROWS, second, second, TILE_ROWS, second, TILE_ROWS, TILE_ROWS};
}

// The same of groups of 32 bytes: 4 and 5 hold rows of x, and nothing else. Of no second half there is one row that
// nobody reads.
inline std::array<int, 8> group_shape(int rows) {
  const int first = std::min(rows, TILE_ROWS), second = std::max(rows - TILE_ROWS, 1), words = 8;
  return {first, first, second, second, first, second, words, words};
}

// Has a quarter of what comes two steps later brought into the cache, so many lines of each word. All at once they
// would stand before this step's own loads (one Sapphire Rapids core, weights in memory: 9.6 GB/s; 10.6 so; 11.8 is all
// it has).
template <int QUARTER, int LINES>
inline void fetch_words(const uint8_t* weight) {
  for (int word = QUARTER * TILE_ROWS / 4; word < (QUARTER + 1) * TILE_ROWS / 4; ++word)
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(weight + 2 * STEP_BYTES + word * PITCH + line * LINE);
}

// The same of rows of x, which lie in the second-level cache where one panel's part of them and of the weight are more
// than the first holds (512 rows; 31 ns a product without, 26 so, of 7 that it takes alone).
template <int QUARTER>
inline void fetch_rows(const uint8_t* x, int64_t x_stride) {
  for (int row = QUARTER * BLOCK / 4; row < (QUARTER + 1) * BLOCK / 4; ++row)
    __builtin_prefetch(x + row * x_stride + 2 * LINE);
}

// 16 rows at most by the four tiles of a panel. `between` is called in every step.
template <typename Product, typename Between>
inline void multiply_low(const uint8_t* x, int64_t x_stride, const uint8_t* weight, int64_t steps, void* sums,
                         const Between& between) {
  auto* to = static_cast<uint8_t*>(sums);
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t step = 0; step < steps; ++step, x += LINE, weight += STEP_BYTES) {
    load_tile<4>(x, x_stride);
    load_tile<5>(weight, PITCH), fetch_words<0, 4>(weight), Product::template add<0, 4, 5>();
    load_tile<6>(weight + LINE, PITCH), fetch_words<1, 4>(weight), Product::template add<1, 4, 6>();
    load_tile<7>(weight + 2 * LINE, PITCH), fetch_words<2, 4>(weight), Product::template add<2, 4, 7>();
    load_tile<5>(weight + 3 * LINE, PITCH), fetch_words<3, 4>(weight), Product::template add<3, 4, 5>();
    between();
  }
  store_tile<0>(to, PITCH), store_tile<1>(to + LINE, PITCH);
  store_tile<2>(to + 2 * LINE, PITCH), store_tile<3>(to + 3 * LINE, PITCH);
}

// 17 rows at least by two tiles of a panel: half as many reads for a product.
template <typename Product, typename Between>
inline void multiply_high(const uint8_t* x, int64_t x_stride, const uint8_t* weight, int64_t steps, void* sums,
                          const Between& between) {
  auto* to = static_cast<uint8_t*>(sums);
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t step = 0; step < steps; ++step, x += LINE, weight += STEP_BYTES) {
    load_tile<6>(weight, PITCH), load_tile<4>(x, x_stride);
    fetch_rows<0>(x, x_stride), fetch_words<0, 2>(weight);
    Product::template add<0, 4, 6>();
    load_tile<7>(weight + LINE, PITCH);
    fetch_rows<1>(x, x_stride), fetch_words<1, 2>(weight);
    Product::template add<1, 4, 7>();
    load_tile<5>(x + TILE_ROWS * x_stride, x_stride);
    fetch_rows<2>(x, x_stride), fetch_words<2, 2>(weight);
    Product::template add<2, 5, 6>();
    fetch_rows<3>(x, x_stride), fetch_words<3, 2>(weight);
    Product::template add<3, 5, 7>();
    between();
  }
  store_tile<0>(to, PITCH), store_tile<1>(to + LINE, PITCH);
  store_tile<2>(to + TILE_ROWS * PITCH, PITCH), store_tile<3>(to + TILE_ROWS * PITCH + LINE, PITCH);
}

// sums [rows, PANEL] of up to BLOCK rows of x, `x_stride` bytes apart, by a group of one panel. As shaped by
// `group_shape`.
inline void multiply_group(const void* x, int64_t x_stride, int rows, const uint8_t* weight, int32_t* sums) {
  const auto* from = static_cast<const uint8_t*>(x);
  const bool is_high = rows > TILE_ROWS;
  load_tile<4>(from, x_stride);
  if (is_high) load_tile<5>(from + TILE_ROWS * x_stride, x_stride);
  for (int half = 0; half < 2; ++half, weight += 2 * LINE) {
    auto* to = reinterpret_cast<uint8_t*>(sums) + half * 2 * LINE;
    load_tile<6>(weight, PITCH), load_tile<7>(weight + LINE, PITCH);
    clear_tile<0>(), SignedByUnsigned::add<0, 4, 6>(), store_tile<0>(to, PITCH);
    clear_tile<1>(), SignedByUnsigned::add<1, 4, 7>(), store_tile<1>(to + LINE, PITCH);
    if (!is_high) continue;
    to += TILE_ROWS * PITCH;
    clear_tile<2>(), SignedByUnsigned::add<2, 5, 6>(), store_tile<2>(to, PITCH);
    clear_tile<3>(), SignedByUnsigned::add<3, 5, 7>(), store_tile<3>(to + LINE, PITCH);
  }
}

// Rows [begin, end) of x, `x_stride` bytes apart, by one panel of so many steps. `finish(row, sums)` is called for each
// row with PANEL words of 32 bits, and `fetch(row)` before it, while there are products to be computed.
template <typename Product, typename Fetch, typename FinishRow>
inline void multiply_tiles(const void* x, int64_t x_stride, int64_t begin, int64_t end, const uint8_t* panel,
                           int64_t steps, const Fetch& fetch, const FinishRow& finish) {
  alignas(64) float sums[BLOCK * PANEL];
  const int height = static_cast<int>(std::min<int64_t>(end - begin, BLOCK));  // of all blocks but the last
  Tiles tiles(shape_of(height));
  for (int64_t row = begin; row < end; row += BLOCK) {
    const int rows = static_cast<int>(std::min<int64_t>(end - row, BLOCK));
    if (rows < height) tiles.shape(shape_of(rows));
    const uint8_t* first = static_cast<const uint8_t*>(x) + row * x_stride;
    int64_t coming = row;
    const auto between = [&] {
      if (coming < row + rows) fetch(coming++);
    };
    if (rows <= TILE_ROWS) {
      multiply_low<Product>(first, x_stride, panel, steps, sums, between);
    } else {
      multiply_high<Product>(first, x_stride, panel, steps, sums, between);
      multiply_high<Product>(first, x_stride, panel + 2 * LINE, steps, sums + PANEL / 2, between);
    }
    for (int64_t r = 0; r < rows; ++r) finish(row + r, sums + r * PANEL);
  }
}

}  // namespace sluice
