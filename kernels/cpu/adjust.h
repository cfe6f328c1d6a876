// Adjusts logits of a row in place before sampling, as in kernels/reference/adjust.py.
//
// Each list holds the entries of all rows of a step, with rows ascending: the entries of one row are adjacent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "lanes.h"

namespace sluice {

// The row of each entry of a list.
struct Listed {
  const int64_t* rows;  // [num], ascending
  int64_t num;

  // Returns the range [first, last) of the entries of `row`.
  std::pair<int64_t, int64_t> of(int64_t row) const {
    const auto [first, last] = std::equal_range(rows, rows + num, row);
    return {first - rows, last - rows};
  }

  // Returns the index of the first entry of `row`, -1 if it has none.
  int64_t find(int64_t row) const {
    const auto [first, last] = of(row);
    return first < last ? first : -1;
  }
};

struct Masks {
  Listed at;
  const uint32_t* bits;  // [num, words]
  int64_t words;
};

struct Bans {
  Listed at;
  const int64_t* ids;  // [num]
};

struct Biases {
  Listed at;
  const int64_t* ids;  // [num]
  const float* values;
};

struct Penalties {
  Listed at;
  const int64_t *firsts, *sizes;  // [num], offset and number of each row's ids
  const int64_t* ids;
  const float* counts;
  const float *repetition, *presence, *frequency;  // [num]
};

struct Changes {
  Masks masks[2];
  Bans bans;
  Biases biases;
  Penalties penalties;
};

constexpr float BANNED = -std::numeric_limits<float>::infinity();

inline void mask(const uint32_t* words, float* logits, int64_t vocab) {
  IntVec lane_bits = {};
  for (int lane = 0; lane < LANES; ++lane) lane_bits[lane] = 1 << lane;
  int64_t id = 0;
  for (; id + LANES <= vocab; id += LANES) {
    const IntVec own = IntVec{} + static_cast<int32_t>(words[id / 32] >> (id % 32));
    store(logits + id, (own & lane_bits) != 0 ? load(logits + id) : broadcast(BANNED));
  }
  for (; id < vocab; ++id)
    if (!(words[id / 32] >> (id % 32) & 1)) logits[id] = BANNED;
}

inline void penalise(const Penalties& from, int64_t i, float* logits) {
  const float repetition = from.repetition[i], presence = from.presence[i], frequency = from.frequency[i];
  for (int64_t at = from.firsts[i]; at < from.firsts[i] + from.sizes[i]; ++at) {
    const float value = logits[from.ids[at]], count = from.counts[at];
    logits[from.ids[at]] = (value > 0.0f ? value / repetition : value * repetition) -
                           (frequency * count + (count > 0.0f ? presence : 0.0f));
  }
}

inline bool touches(const Changes& changes, int64_t row) {
  for (const Masks& one : changes.masks)
    if (one.at.find(row) >= 0) return true;
  return changes.bans.at.find(row) >= 0 || changes.biases.at.find(row) >= 0 || changes.penalties.at.find(row) >= 0;
}

inline void adjust(const Changes& changes, int64_t row, float* logits, int64_t vocab) {
  for (const Masks& one : changes.masks)
    if (const int64_t at = one.at.find(row); at >= 0) mask(one.bits + at * one.words, logits, vocab);
  const auto [ban, last_ban] = changes.bans.at.of(row);
  for (int64_t i = ban; i < last_ban; ++i) logits[changes.bans.ids[i]] = BANNED;
  const auto [bias, last_bias] = changes.biases.at.of(row);
  for (int64_t i = bias; i < last_bias; ++i) logits[changes.biases.ids[i]] += changes.biases.values[i];
  if (const int64_t at = changes.penalties.at.find(row); at >= 0) penalise(changes.penalties, at, logits);
}

}  // namespace sluice
