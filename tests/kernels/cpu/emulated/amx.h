// In the place of kernels/cpu/amx.h: the same instructions as their definitions say.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "instructions.h"

namespace sluice {

struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

struct Tile {
  uint8_t at[16][64];
};

inline thread_local TileShapes shapes_in_use;
inline thread_local Tile tiles_in_use[8];

inline bool request_tiles() { return true; }

inline void load_shapes(const TileShapes& shapes) {
  shapes_in_use = shapes;
  std::memset(tiles_in_use, 0, sizeof tiles_in_use);
}

inline void release_tiles() { shapes_in_use = TileShapes(); }

template <int TO>
inline void clear_tile() {
  tiles_in_use[TO] = Tile();
}

template <int TO>
inline void load_tile(const void* from, int64_t stride) {
  tiles_in_use[TO] = Tile();
  for (int row = 0; row < shapes_in_use.rows[TO]; ++row)
    std::memcpy(tiles_in_use[TO].at[row], static_cast<const uint8_t*>(from) + row * stride, shapes_in_use.bytes[TO]);
}

template <int FROM>
inline void store_tile(void* to, int64_t stride) {
  for (int row = 0; row < shapes_in_use.rows[FROM]; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles_in_use[FROM].at[row], shapes_in_use.bytes[FROM]);
}

// to [rows, columns] += x [rows, words] · weight [words, columns], Number by number of a word.
template <int TO, int X, int WEIGHT, typename Sum, typename Product>
inline void add_products(const Product& product) {
  for (int row = 0; row < shapes_in_use.rows[TO]; ++row)
    for (int word = 0; word < shapes_in_use.rows[WEIGHT]; ++word)
      for (int column = 0; column < shapes_in_use.bytes[TO] / 4; ++column) {
        Sum sum;
        uint8_t* to = tiles_in_use[TO].at[row] + column * 4;
        std::memcpy(&sum, to, 4);
        sum += product(tiles_in_use[X].at[row] + word * 4, tiles_in_use[WEIGHT].at[word] + column * 4);
        std::memcpy(to, &sum, 4);
      }
}

struct SignedByUnsigned {
  template <int TO, int X, int WEIGHT>
  static void add() {
    add_products<TO, X, WEIGHT, int32_t>([](const uint8_t* x, const uint8_t* weight) {
      int32_t sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(x[i]) * weight[i];
      return sum;
    });
  }
};

struct BFloat16s {
  template <int TO, int X, int WEIGHT>
  static void add() {
    add_products<TO, X, WEIGHT, float>([](const uint8_t* x, const uint8_t* weight) {
      uint16_t left[2], right[2];
      std::memcpy(left, x, 4), std::memcpy(right, weight, 4);
      return emulated::widened(left[0]) * emulated::widened(right[0]) +
             emulated::widened(left[1]) * emulated::widened(right[1]);
    });
  }
};

}  // namespace sluice
