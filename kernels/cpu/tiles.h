// Products of tiles (Intel AMX): up to 16 rows of x by 16 columns of a weight, a line of 64 bytes of each at a time.
//
// A word is what one column has of a line: four bytes or two numbers of bfloat16, as in panels.h's packed weights. What
// one row computes is the same in any company: rows of a tile do not mix, and words are summed in ascending order.
// Written as instructions: GCC 12's intrinsics take no template's number as that of a tile.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <array>

#include "panels.h"

namespace sluice {

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE_ROWS = 16;         // of x, and words of a line
constexpr int PITCH = PANEL * 4;      // bytes from one word of a panel to the next
constexpr int BLOCK = 2 * TILE_ROWS;  // rows of x that share what is read of a weight
constexpr int64_t WORDS_A_STEP = HAS_TILES ? TILE_ROWS : 1;  // packed weights and rows of x are padded to whole steps

// Words from one row of x to the next, of rows of so many: whole vectors, and for tiles an odd number of lines, as rows at
// a power of two would share a few sets of the first-level cache.
inline int64_t words_stride(int64_t words) {
  const int64_t lines = (words + LANES - 1) / LANES;
  return (HAS_TILES ? lines | 1 : lines) * LANES;
}

// The operating system keeps tiles only for those who asked. Whether it does; once for the process.
inline bool request_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // <asm/prctl.h> of Linux 5.16
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// The eight tiles of a thread, of so many rows each and a line wide. Given back when this ends: what a thread holds is
// saved whenever it is taken off its core.
class Tiles {
 public:
  explicit Tiles(std::array<int, 8> rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.rows[tile] = static_cast<uint8_t>(rows[tile]);
      shape.bytes[tile] = LINE;
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { asm volatile("tilerelease"); }
};

template <int TO>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TO));
}

template <int TO>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TO) : "memory");
}

template <int FROM>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(FROM) : "memory");
}

struct SignedByUnsigned {  // bytes; sums are int32
  template <int TO, int X, int WEIGHT>
  static void add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(TO), "i"(X), "i"(WEIGHT));
  }
};

struct BFloat16s {  // sums are float32
  template <int TO, int X, int WEIGHT>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(TO), "i"(X), "i"(WEIGHT));
  }
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 columns of a weight; where all rows fit into 4, 5 has columns, too.
inline std::array<int, 8> shape_of(int rows) {
  if (rows <= TILE_ROWS) return {rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS, TILE_ROWS};
  const int second = rows - TILE_ROWS;
  return {TILE_ROWS, TILE_ROWS, second, second, TILE_ROWS, second, TILE_ROWS, TILE_ROWS};
}

// 16 rows at most by the four tiles of a panel.
template <typename Product>
inline void multiply_low(const uint8_t* x, int64_t x_stride, const uint8_t* weight, int64_t steps, void* sums) {
  auto* to = static_cast<uint8_t*>(sums);
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t step = 0; step < steps; ++step, x += LINE, weight += TILE_ROWS * PITCH) {
    for (int line = 0; line < TILE_ROWS * PITCH / LINE; ++line) fetch_ahead(weight + line * LINE);
    load_tile<4>(x, x_stride);
    load_tile<5>(weight, PITCH), Product::template add<0, 4, 5>();
    load_tile<6>(weight + LINE, PITCH), Product::template add<1, 4, 6>();
    load_tile<7>(weight + 2 * LINE, PITCH), Product::template add<2, 4, 7>();
    load_tile<5>(weight + 3 * LINE, PITCH), Product::template add<3, 4, 5>();
  }
  store_tile<0>(to, PITCH), store_tile<1>(to + LINE, PITCH);
  store_tile<2>(to + 2 * LINE, PITCH), store_tile<3>(to + 3 * LINE, PITCH);
}

// A quarter of the two columns that come a step later: all at once they stand before the loads of this one.
template <int QUARTER>
inline void fetch_words(const uint8_t* weight) {
  static_assert(AHEAD == TILE_ROWS * PITCH || !HAS_TILES);
  for (int word = QUARTER * TILE_ROWS / 4; word < (QUARTER + 1) * TILE_ROWS / 4; ++word)
    fetch_ahead(weight + word * PITCH), fetch_ahead(weight + word * PITCH + LINE);
}

// 17 rows at least by two tiles of a panel: half as many reads for a product.
template <typename Product>
inline void multiply_high(const uint8_t* x, int64_t x_stride, const uint8_t* weight, int64_t steps, void* sums) {
  auto* to = static_cast<uint8_t*>(sums);
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t step = 0; step < steps; ++step, x += LINE, weight += TILE_ROWS * PITCH) {
    load_tile<6>(weight, PITCH), load_tile<4>(x, x_stride);
    fetch_words<0>(weight);
    Product::template add<0, 4, 6>();
    load_tile<7>(weight + LINE, PITCH);
    fetch_words<1>(weight);
    Product::template add<1, 4, 7>();
    load_tile<5>(x + TILE_ROWS * x_stride, x_stride);
    fetch_words<2>(weight);
    Product::template add<2, 5, 6>();
    fetch_words<3>(weight);
    Product::template add<3, 5, 7>();
  }
  store_tile<0>(to, PITCH), store_tile<1>(to + LINE, PITCH);
  store_tile<2>(to + TILE_ROWS * PITCH, PITCH), store_tile<3>(to + TILE_ROWS * PITCH + LINE, PITCH);
}

// sums [rows, PANEL] = rows of x by a panel of `steps` lines; x_stride in bytes.
template <typename Product>
inline void multiply_tiles(const uint8_t* x, int64_t x_stride, int64_t rows, const uint8_t* panel, int64_t steps,
                           uint8_t* sums) {
  for (; rows > 0; rows -= BLOCK, x += BLOCK * x_stride, sums += BLOCK * PITCH) {
    const Tiles tiles(shape_of(static_cast<int>(std::min<int64_t>(rows, BLOCK))));
    if (rows <= TILE_ROWS) return multiply_low<Product>(x, x_stride, panel, steps, sums);
    for (int half = 0; half < PITCH; half += 2 * LINE)
      multiply_high<Product>(x, x_stride, panel + half, steps, sums + half);
  }
}

}  // namespace sluice
