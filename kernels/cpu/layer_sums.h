// The sums of ranks within a call of layers: a rank multiplies its part of a linear's inputs, and adds what all ranks
// made of theirs before it goes on. Bits are those of the same products and sums one by one.
#pragma once

#include "experts.h"
#include "sums.h"

namespace sluice {

// What a rank has of the linears of a layer whose inputs are shared out: matrices of one format and size each, in the
// order of their inputs. As engine/models/layers/layer.py writes it.
struct LayerShards {
  int64_t num;     // of each linear
  Matrix each[1];  // those of the output behind attention, then those of down

  const Matrix* output() const { return each; }

  const Matrix* down() const { return each + num; }
};

// The sums of one call.
struct LayerSums {
  Segment segment;       // its number goes on from sum to sum; without memory this is the only rank
  double seconds = 0.0;  // that all of them took, waits included
  Outcome outcome = {};

  bool are_well() const { return outcome.fault == Fault::NONE; }
};

// Where to put so many numbers of this rank for the next sum: where the others read them, if they fit.
inline float* place_of(const Segment& segment, int64_t floats) {
  static thread_local Workspace<float> workspace;
  const bool fits = segment.first != nullptr && floats <= segment.slot_floats;
  return fits ? segment.slot(segment.rank) : workspace.fit(floats);
}

// into [rows, width] += the partial products of all ranks, in their order; this rank's lie one behind the other.
inline void add_of_all(LayerSums& sums, const float* own, int64_t num, int64_t rows, int64_t width, float* into) {
  std::vector<const float*> partials;
  for (int64_t one = 0; one < num; ++one) partials.push_back(own + one * rows * width);
  if (sums.segment.first == nullptr) return add_in_order(partials, rows * width, into);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  AddSums job{sums.segment, into, rows, width, std::move(partials), {}};
  run(job);
  sums.segment.number = job.segment.number, sums.outcome = job.outcome;
  sums.seconds += std::chrono::duration<double>(Clock::now() - start).count();
}

// h [tokens, outputs] += the sum of what all ranks make of their inputs x; `layer` is of one shard.
inline void add_shared(const Packed& layer, const Matrix* shards, int64_t num, Rows x, int64_t tokens, float* h,
                       LayerSums& sums) {
  constexpr float no_norm = -1.0f;
  const int64_t each = tokens * layer.outputs;
  float* own = place_of(sums.segment, num * each);
  for (int64_t one = 0; one < num; ++one) {
    Packed shard = layer;
    shard.weight = shards[one].weight, shard.bias = shards[one].bias;
    const Rows to{own + one * each, layer.outputs};
    apply(shard, {x.first + one * layer.inputs, x.stride}, tokens, no_norm, Finish::STORE, to);
  }
  add_of_all(sums, own, num, tokens, layer.outputs, h);
}

}  // namespace sluice
