// The instructions of Intel AMX on numbered tiles of up to 16 rows of 64 bytes. Written in assembly, since GCC 12's
// intrinsics do not accept a template argument as the tile's number.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace sluice {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // bytes of a row
  uint8_t rows[16] = {};
};

// Requests the operating system's permission to use tiles, once for the process. Returns whether it was granted.
inline bool request_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // <asm/prctl.h> of Linux 5.16
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

inline void release_tiles() { asm volatile("tilerelease"); }

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

}  // namespace sluice
