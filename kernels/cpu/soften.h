// Soft-capping (Bello et al. 2016; Gemma 2) of attention scores and logits: x becomes cap · tanh(x / cap).
//
// The result of a number depends on that number only: the end of a row is computed as a whole vector, too.
#pragma once

#include <algorithm>

#include "panels.h"

namespace sluice {

inline Vec softened(Vec x, float cap) { return tanh(x / cap) * cap; }

// Caps `num` numbers in place. Not inlined, so that models without a cap keep the same code around the call.
[[gnu::noinline]] inline void soften(float* x, int64_t num, float cap) {
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) store(x + i, softened(load(x + i), cap));
  if (i == num) return;
  float rest[LANES] = {};
  std::copy(x + i, x + num, rest);
  store(rest, softened(load(rest), cap));
  std::copy(rest, rest + (num - i), x + i);
}

struct SoftCap {
  float* x;  // [num], changed in place
  int64_t num;
  float cap;
};

inline void run(const SoftCap& job) {
  constexpr int64_t part = 4096;
  each_row((job.num + part - 1) / part, part,
           [&](int64_t at) { soften(job.x + at * part, std::min(part, job.num - at * part), job.cap); });
}

}  // namespace sluice
