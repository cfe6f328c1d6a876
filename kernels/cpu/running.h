// The running softmax of attention (Milakov & Gimelshein 2018): turns the scores of a block of keys into weights.
#pragma once

#include <limits>

#include "exponentials.h"
#include "queries.h"

namespace sluice {

// The running softmax of a tile's queries. `peak` is padded by a vector.
struct Running {
  alignas(64) float acc[QUERIES * MAX_DIM];  // [QUERIES, dim]
  float peak[QUERIES + LANES];
  float totals[QUERIES][LANES];  // of weights, by the key's lane

  // Raises the maxima of `count` queries from `first` on to `highest` where that is more, and rescales their sums.
  void raise(int first, Vec highest, int64_t dim) {
    const Vec before = load(peak + first);
    const uint32_t risen = bits_of(highest > before);
    if (risen == 0) return;
    float shrinks[LANES];
    store(shrinks, exp(before - highest));  // of those that rise; 0 the first time
    store(peak + first, highest > before ? highest : before);
    for (uint32_t left = risen; left != 0; left &= left - 1) {
      const int r = __builtin_ctz(left);
      float* own = acc + (first + r) * dim;
      for (int64_t d = 0; d < dim; d += LANES) store(own + d, load(own + d) * shrinks[r]);
      store(totals[first + r], load(totals[first + r]) * shrinks[r]);
    }
  }
};

// Sets the scores of keys [from, from + NUM) outside [begin, end) to minus infinity.
template <int NUM>
inline void hide(float (&scores)[NUM], int64_t from, int64_t begin, int64_t end) {
  if (from >= begin && from + NUM <= end) return;
  for (int64_t j = 0; j < NUM; ++j)
    if (from + j < begin || from + j >= end) scores[j] = -std::numeric_limits<float>::infinity();
}

// Turns the scores of keys [from, from + NUM) into softmax weights, for up to MOST queries from `first` on. The sums of
// a query that sees none of the keys stay unchanged. Not inlined, as it is long and called from several places.
template <int MOST, int NUM>
[[gnu::noinline]] void weigh(const QueryTile& tile, int first, int count, int64_t from, float (*scores)[NUM],
                             Running& running, int64_t dim) {
  const Vec none = broadcast(-std::numeric_limits<float>::infinity());
  Vec best[MOST];
  bool sees[MOST];
#pragma GCC unroll 4
  for (int r = 0; r < MOST; ++r) {
    best[r] = none, sees[r] = false;
    if (r >= count) continue;
    const int64_t begin = tile.begin[first + r], end = tile.end[first + r];
    sees[r] = from + NUM > begin && from < end;
    if (!sees[r]) continue;
    hide(scores[r], from, begin, end);
#pragma GCC unroll 4
    for (int j = 0; j < NUM; j += LANES) best[r] = greater(best[r], load(scores[r] + j));
  }
  running.raise(first, first_lanes<MOST>(greatests<MOST>(best), none), dim);
#pragma GCC unroll 4
  for (int r = 0; r < MOST && r < count; ++r) {
    if (!sees[r]) {
      for (int j = 0; j < NUM; j += LANES) store(scores[r] + j, Vec{});
      continue;
    }
    const Vec peak = broadcast(running.peak[first + r]);
    Vec total = load(running.totals[first + r]);
#pragma GCC unroll 4
    for (int j = 0; j < NUM; j += LANES) {
      const Vec weight = exp_of_negative(load(scores[r] + j) - peak);
      store(scores[r] + j, weight);
      total += weight;
    }
    store(running.totals[first + r], total);
  }
}

}  // namespace sluice
