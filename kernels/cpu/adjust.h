// Adjusts logits of a row in place before sampling, as in kernels/reference/adjust.py.
//
// Each list holds the entries of all rows of a step, with rows ascending: the entries of one row are adjacent.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "lanes.h"
#include "masks.h"

namespace sluice {

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

constexpr int64_t MOST_LISTED = 2048;  // ids of a row that are looked at one by one rather than whole rows of logits
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

// Applies a row's masks.
inline void mask(const Changes& changes, int64_t row, float* logits, int64_t vocab) {
  for (const Masks& one : changes.masks)
    if (const uint32_t* bits = one.of(row)) mask(bits, logits, vocab);
}

// Applies what else changes a row's logits.
inline void adjust(const Changes& changes, int64_t row, float* logits) {
  const auto [ban, last_ban] = changes.bans.at.of(row);
  for (int64_t i = ban; i < last_ban; ++i) logits[changes.bans.ids[i]] = BANNED;
  const auto [bias, last_bias] = changes.biases.at.of(row);
  for (int64_t i = bias; i < last_bias; ++i) logits[changes.biases.ids[i]] += changes.biases.values[i];
  if (const int64_t at = changes.penalties.at.find(row); at >= 0) penalise(changes.penalties, at, logits);
}

// Leaves in `ids` those that a row's masks allow, ascending. Returns false if it has no mask, or if they are many.
inline bool list_allowed(const Changes& changes, int64_t row, int64_t vocab, std::vector<int64_t>& ids) {
  const uint32_t *first = changes.masks[0].of(row), *second = changes.masks[1].of(row);
  if (first == nullptr) std::swap(first, second);
  ids.clear();
  if (first == nullptr) return false;
  const int64_t words = (vocab + 31) / 32;
  for (int64_t word = 0; word < words; ++word) {
    uint32_t left = second == nullptr ? first[word] : first[word] & second[word];
    if (left == 0) continue;
    if (static_cast<int64_t>(ids.size()) + __builtin_popcount(left) > MOST_LISTED) return false;
    for (; left; left &= left - 1)
      if (const int64_t id = word * 32 + __builtin_ctz(left); id < vocab) ids.push_back(id);
  }
  return true;
}

}  // namespace sluice
