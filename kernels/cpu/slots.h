// The cache: where keys and values lie, in which number formats, and how those of a step get there.
//
// float32; bfloat16, rounded to the nearest; 8 bits, whose scale (float32: the head's greatest number / 127) lies in
// the four bytes behind the levels, so that whatever moves a slot moves its scale.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "pool.h"
#include "vector.h"

namespace sluice {

template <typename Element>
constexpr bool IS_SCALED = sizeof(Element) == 1;

// Elements of one head's key or value.
template <typename Element>
constexpr int64_t width(int64_t dim) {
  return dim + (IS_SCALED<Element> ? sizeof(float) : 0);
}

// A layer's blocks, in whatever order of bytes kernels/layout.py chose. Strides are of elements.
template <typename Element>
struct Cache {
  Element* first;
  int64_t block_size;                // tokens
  int64_t block, token, half, head;  // strides; half: from a key to its value

  // The key of one head; its value lies `half` behind it.
  Element* key(int64_t block_id, int64_t within, int64_t head_id) const {
    return first + block_id * block + within * token + head_id * head;
  }
};

inline float scale_of(const int8_t* levels, int64_t dim) {
  float scale;
  std::memcpy(&scale, levels + dim, sizeof scale);
  return scale;
}

inline void put(float* to, const float* from, int64_t dim) { std::memcpy(to, from, dim * sizeof(float)); }

inline void put(uint16_t* to, const float* from, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    uint32_t bits;
    std::memcpy(&bits, from + d, sizeof bits);
    const bool is_nan = from[d] != from[d];
    to[d] = static_cast<uint16_t>(is_nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// A NaN or an infinity makes the scale NaN: whoever attends to it learns that something is broken.
inline void put(int8_t* to, const float* from, int64_t dim) {
  float peak = 0.0f, broken = 0.0f;
  for (int64_t d = 0; d < dim; ++d) peak = std::max(peak, std::fabs(from[d])), broken += from[d] * 0.0f;
  const float scale = broken == 0.0f ? peak / 127.0f : std::numeric_limits<float>::quiet_NaN();
  const float by = broken == 0.0f && peak > 1e-30f ? 127.0f / peak : 0.0f;
  for (int64_t d = 0; d < dim; ++d)
    to[d] = broken == 0.0f ? static_cast<int8_t>(std::nearbyint(from[d] * by)) : int8_t{0};
  std::memcpy(to + dim, &scale, sizeof scale);
}

// Rows of states into their slots, rounded to bfloat16.
struct Keep {
  const float* states;  // [T, width]
  int64_t tokens, width;
  uint16_t* table;  // [slots, stride], from the column where they go
  int64_t stride;
  const int64_t* slots;  // [T]
};

inline void run(const Keep& job) {
  for (int64_t t = 0; t < job.tokens; ++t)
    put(job.table + job.slots[t] * job.stride, job.states + t * job.width, job.width);
}

template <typename Element>
struct RotateAndWrite {
  float* heads;  // [T, num_heads + kv_heads (keys) + kv_heads (values), dim]: queries and keys rotated in place
  const float* cis;  // [T, dim / 2] complex
  int64_t tokens, num_heads, kv_heads, dim;
  Cache<Element> cache;
  const int64_t* slots;  // [T] where each token's keys and values go
  const float* norms = nullptr;  // [num_heads + kv_heads, dim]: queries and keys are normed head by head before; or null
  float eps = 0.0f;
};

// Divides each of the heads by its root mean square and multiplies it by its weights.
inline void norm_heads(float* x, const float* norms, int64_t heads, int64_t dim, float eps) {
  for (int64_t h = 0; h < heads; ++h, x += dim, norms += dim) {
    const float scale = norm_scale(x, dim, eps);
    for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale * load(norms + d));
  }
}

template <typename Element>
inline void run(const RotateAndWrite<Element>& job) {
  const int64_t rotated = job.num_heads + job.kv_heads, all = (rotated + job.kv_heads) * job.dim;
  const auto one = [&](int64_t t) {
    float* x = job.heads + t * all;
    const float* cis = job.cis + t * job.dim;
    if (job.norms != nullptr) norm_heads(x, job.norms, rotated, job.dim, job.eps);
    for (int64_t h = 0; h < rotated; ++h)
      for (int64_t d = 0; d < job.dim; d += 2) {
        float* pair = x + h * job.dim + d;
        const float a = pair[0], b = pair[1], c = cis[d], s = cis[d + 1];
        pair[0] = a * c - b * s;
        pair[1] = a * s + b * c;
      }
    const int64_t block = job.slots[t] / job.cache.block_size, within = job.slots[t] % job.cache.block_size;
    for (int64_t h = 0; h < job.kv_heads; ++h) {
      Element* to = job.cache.key(block, within, h);
      put(to, x + (job.num_heads + h) * job.dim, job.dim);
      put(to + job.cache.half, x + (rotated + h) * job.dim, job.dim);
    }
  };
  const int64_t pieces = std::min<int64_t>(job.tokens * all <= SMALL ? 1 : 64, job.tokens);
  Pool::instance().run(static_cast<int>(pieces), [&](int64_t piece) {
    for (int64_t t = job.tokens * piece / pieces; t < job.tokens * (piece + 1) / pieces; ++t) one(t);
  });
}

}  // namespace sluice
