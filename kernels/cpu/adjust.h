// Changes of single logits before sampling, in place, as kernels/adjust.py has them.
#pragma once

#include <cstdint>
#include <limits>

#include "lanes.h"

namespace sluice {

struct Masking {
  float* logits;  // [.., vocab]
  int64_t vocab;
  const int64_t* rows;   // [num]
  const uint32_t* bits;  // [num, words]
  int64_t num, words;
};

struct Barring {
  float* logits;
  int64_t vocab;
  const int64_t *rows, *ids;  // [num]
  int64_t num;
};

struct Biasing {
  float* logits;
  int64_t vocab;
  const int64_t *rows, *ids;  // [num]
  const float* values;
  int64_t num;
};

struct Penalising {
  float* logits;
  int64_t vocab;
  const int64_t *rows, *sizes;  // [num]
  const int64_t* ids;           // all rows' in turn
  const float* counts;
  const float *repetition, *presence, *frequency;  // [num]
  int64_t num;
};

constexpr float BARRED = -std::numeric_limits<float>::infinity();

inline void run(const Masking& job) {
  IntVec lane_bits = {};
  for (int lane = 0; lane < LANES; ++lane) lane_bits[lane] = 1 << lane;
  for (int64_t i = 0; i < job.num; ++i) {
    float* logits = job.logits + job.rows[i] * job.vocab;
    const uint32_t* words = job.bits + i * job.words;
    int64_t id = 0;
    for (; id + LANES <= job.vocab; id += LANES) {
      const IntVec own = IntVec{} + static_cast<int32_t>(words[id / 32] >> (id % 32));
      store(logits + id, (own & lane_bits) != 0 ? load(logits + id) : broadcast(BARRED));
    }
    for (; id < job.vocab; ++id)
      if (!(words[id / 32] >> (id % 32) & 1)) logits[id] = BARRED;
  }
}

inline void run(const Barring& job) {
  for (int64_t i = 0; i < job.num; ++i) job.logits[job.rows[i] * job.vocab + job.ids[i]] = BARRED;
}

inline void run(const Biasing& job) {
  for (int64_t i = 0; i < job.num; ++i) job.logits[job.rows[i] * job.vocab + job.ids[i]] += job.values[i];
}

inline void run(const Penalising& job) {
  const int64_t* id = job.ids;
  const float* count = job.counts;
  for (int64_t i = 0; i < job.num; ++i) {
    float* logits = job.logits + job.rows[i] * job.vocab;
    const float repetition = job.repetition[i], presence = job.presence[i], frequency = job.frequency[i];
    for (const int64_t* end = id + job.sizes[i]; id < end; ++id, ++count) {
      const float value = logits[*id];
      logits[*id] = (value > 0.0f ? value / repetition : value * repetition) -
                    (frequency * *count + (*count > 0.0f ? presence : 0.0f));
    }
  }
}

}  // namespace sluice
