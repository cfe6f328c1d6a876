// The paged cache of keys and values: its layout, its number formats, and the writing of a step's keys and values.
//
// The formats are float32, bfloat16 (rounded to nearest) and int8. The scale of an int8 head (float32, the greatest
// magnitude / 127) lies in the four bytes behind its numbers, so that a copy of a slot copies the scale too.
#pragma once

#include <algorithm>
#include <limits>

#include "pool.h"
#include "vector.h"

namespace sluice {

template <typename Element>
constexpr bool IS_SCALED = sizeof(Element) == 1;

// Returns the number of elements of one head's key or value.
template <typename Element>
constexpr int64_t width(int64_t dim) {
  return dim + (IS_SCALED<Element> ? sizeof(float) : 0);
}

// The blocks of one layer, in the layout that kernels/layout/layout.py chose. Strides count elements.
template <typename Element>
struct Cache {
  Element* first;
  int64_t block_size;                // tokens
  int64_t block, token, half, head;  // strides; half: from a key to its value

  // Returns the key of one head; its value lies `half` elements behind it.
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

// Calls work(vector, at) for each vector of `num` numbers; the last one is padded with zeros.
template <typename Work>
inline void each_vector(const float* from, int64_t num, const Work& work) {
  int64_t at = 0;
  for (; at + LANES <= num; at += LANES) work(load(from + at), at);
  if (at == num) return;
  float rest[LANES] = {};
  std::copy(from + at, from + num, rest);
  work(load(rest), at);
}

// Stores the first `num` lanes of a vector, or all lanes if `num` is greater.
template <typename Element, typename Lanes>
inline void store_first(Element* to, Lanes v, int64_t num) {
  if (num >= LANES) return store(to, v);
  Element rest[LANES];
  store(rest, v);
  std::copy(rest, rest + num, to);
}

inline void put(uint16_t* to, const float* from, int64_t dim) {
  each_vector(from, dim, [&](Vec v, int64_t d) { store_first(to + d, v, dim - d); });
}

// A NaN or an infinity makes the scale NaN, so that attention to this slot gives NaN instead of a wrong number.
inline void put(int8_t* to, const float* from, int64_t dim) {
  Vec most{}, odd{};
  each_vector(from, dim, [&](Vec v, int64_t) { most = greater(most, absolute(v)), odd += v * 0.0f; });
  const float peak = greatest(most);
  const bool is_broken = sum(odd) != 0.0f;
  const float scale = is_broken ? std::numeric_limits<float>::quiet_NaN() : peak / 127.0f;
  const float by = !is_broken && peak > 1e-30f ? 127.0f / peak : 0.0f;
  each_vector(from, dim,
              [&](Vec v, int64_t d) { store_first(to + d, is_broken ? IntVec{} : nearest(v * by), dim - d); });
  std::memcpy(to + dim, &scale, sizeof scale);
}

// Writes rows of hidden states to their slots, rounded to bfloat16.
struct Keep {
  const float* states;  // [T, width]
  int64_t tokens, width;
  uint16_t* table;  // [slots, stride], starting at the first column to write
  int64_t stride;
  const int64_t* slots;  // [T]
};

inline void run(const Keep& job) {
  for (int64_t t = 0; t < job.tokens; ++t)
    put(job.table + job.slots[t] * job.stride, job.states + t * job.width, job.width);
}

template <typename Element>
struct RotateAndWrite {
  float* heads;      // [T, num_heads + kv_heads (keys) + kv_heads (values), dim]: queries and keys rotated in place
  int64_t stride;    // from one token to the next
  const float* cis;  // [T, dim / 2] complex
  int64_t tokens, num_heads, kv_heads, dim;
  Cache<Element> cache;
  const int64_t* slots;          // [T] the slot of each token's keys and values
  const float* norms = nullptr;  // [num_heads + kv_heads, dim] weights of RMS norms applied before rotation; or null
  float eps = 0.0f;
};

// Divides each of the heads by its root mean square and multiplies it by its weights.
inline void norm_heads(float* x, const float* norms, int64_t heads, int64_t dim, float eps) {
  for (int64_t h = 0; h < heads; ++h, x += dim, norms += dim) {
    const float scale = norm_scale(x, dim, eps);
    for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale * load(norms + d));
  }
}

// `firsts` and `seconds` repeat the first or second lane of each pair; `turned_round` swaps the lanes of each pair.
template <int... LANE>
inline Vec firsts(Vec v, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(v, v, (LANE & ~1)...);
}

template <int... LANE>
inline Vec seconds(Vec v, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(v, v, (LANE | 1)...);
}

template <int... LANE>
inline Vec turned_round(Vec v, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(v, v, (LANE ^ 1)...);
}

template <int... LANE>
inline Vec signs(std::integer_sequence<int, LANE...>) {
  return Vec{(LANE % 2 == 0 ? -1.0f : 1.0f)...};
}

// Multiplies heads [heads, dim], whose pairs are complex numbers, by cis [dim / 2] in place.
inline void rotate(float* x, const float* cis, int64_t heads, int64_t dim) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) {
    const Vec turns = load(cis + d), cosines = firsts(turns, lanes), sines = seconds(turns, lanes) * signs(lanes);
    for (float* at = x + d; at < x + heads * dim; at += dim)
      store(at, load(at) * cosines + turned_round(load(at), lanes) * sines);
  }
  for (; d < dim; d += 2)
    for (float* pair = x + d; pair < x + heads * dim; pair += dim) {
      const float a = pair[0], b = pair[1], c = cis[d], s = cis[d + 1];
      pair[0] = a * c - b * s;
      pair[1] = a * s + b * c;
    }
}

template <typename Element>
inline void run(const RotateAndWrite<Element>& job) {
  const int64_t rotated = job.num_heads + job.kv_heads, all = (rotated + job.kv_heads) * job.dim;
  const auto one = [&](int64_t t) {
    float* x = job.heads + t * job.stride;
    const float* cis = job.cis + t * job.dim;
    if (job.norms != nullptr) norm_heads(x, job.norms, rotated, job.dim, job.eps);
    rotate(x, cis, rotated, job.dim);
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
