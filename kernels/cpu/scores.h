// Log probabilities and ranks of tokens and of their alternatives, row by row, as in kernels/reference/scores.py. Ranks
// order the logits; of equal logits the lowest id comes first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "adjust.h"
#include "exponentials.h"
#include "lanes.h"

namespace sluice {

struct Scoring {
  const int64_t* nums;    // [rows] how many of the likeliest ids to return
  int64_t width;          // the greatest of nums
  Listed pairs;           // rows of the ids in `others`
  const int64_t* others;  // [pairs] further ids to score
  float* logprobs;        // [rows]
  int64_t* ranks;         // [rows]
  int64_t* top_ids;       // [rows, width]
  float* top_logprobs;    // [rows, width]
  float* other_logprobs;  // [pairs]
  int64_t* other_ranks;   // [pairs]
};

using Heap = std::vector<std::pair<float, int64_t>>;

// log of the sum of e^logit, as the greatest logit plus a rest.
struct Norm {
  float peak, rest;

  float logprob(float logit) const { return logit - peak - rest; }
};

inline Norm norm_of(const float* logits, int64_t num) {
  Vec peaks = broadcast(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) peaks = greater(load(logits + i), peaks);
  float peak = greatest(peaks);
  for (; i < num; ++i) peak = logits[i] > peak ? logits[i] : peak;
  Sums sums;
  i = 0;
  for (; i + LANES <= num; i += LANES) sums.add(exp(load(logits + i) - peak));
  double mass = sums.all();
  for (; i < num; ++i) mass += std::exp(static_cast<double>(logits[i] - peak));
  return {peak, static_cast<float>(std::log(mass))};
}

inline int64_t rank_of(const float* logits, int64_t num, float value) {
  int64_t rank = 1;
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) rank += __builtin_popcount(bits_of(load(logits + i) > value));
  for (; i < num; ++i) rank += logits[i] > value;
  return rank;
}

// Finds the k likeliest ids with a heap whose front is the least likely of them.
inline void find_top(const float* logits, int64_t num, int64_t k, Heap& heap) {
  const auto better = [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  heap.clear();
  for (int64_t id = 0; id < k; ++id) heap.push_back({logits[id], id});
  std::make_heap(heap.begin(), heap.end(), better);
  const auto meet = [&](int64_t id) {
    if (!(logits[id] > heap.front().first)) return;
    std::pop_heap(heap.begin(), heap.end(), better);
    heap.back() = {logits[id], id};
    std::push_heap(heap.begin(), heap.end(), better);
  };
  int64_t i = k;
  for (; i + LANES <= num; i += LANES)
    for (uint32_t left = bits_of(load(logits + i) > heap.front().first); left; left &= left - 1)
      meet(i + __builtin_ctz(left));
  for (; i < num; ++i) meet(i);
  std::sort_heap(heap.begin(), heap.end(), better);
}

// Scores the likeliest ids of row `at` and the ids that its request names.
inline void score_rivals(const Scoring& job, int64_t at, const float* logits, int64_t vocab, Norm norm, Heap& heap) {
  if (job.nums[at] > 0) {
    find_top(logits, vocab, job.nums[at], heap);
    for (int64_t i = 0; i < job.nums[at]; ++i) {
      job.top_ids[at * job.width + i] = heap[i].second;
      job.top_logprobs[at * job.width + i] = norm.logprob(heap[i].first);
    }
  }
  const auto [first, last] = job.pairs.of(at);
  for (int64_t pair = first; pair < last; ++pair) {
    const float other = logits[job.others[pair]];
    job.other_logprobs[pair] = norm.logprob(other);
    job.other_ranks[pair] = rank_of(logits, vocab, other);
  }
}

// Scores the token of row `at`; minus infinity and rank 0 if it has none (id < 0).
inline void score_own(const Scoring& job, int64_t at, const float* logits, int64_t vocab, Norm norm, int64_t id) {
  job.logprobs[at] = id < 0 ? BANNED : norm.logprob(logits[id]);
  job.ranks[at] = id < 0 ? 0 : rank_of(logits, vocab, logits[id]);
}

}  // namespace sluice
