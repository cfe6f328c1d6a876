// Log probabilities and ranks of tokens and their rivals, row by row, as kernels/scores.py has them. Ranks are of the
// logits; equal ones are listed lowest id first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "lanes.h"

namespace sluice {

struct Scoring {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const int64_t *ids, *nums;  // [rows]
  int64_t width;              // the greatest of nums
  const int64_t *other_rows, *others;  // [pairs], pairs of a row together, rows ascending
  int64_t pairs;
  float *logprobs, *top_logprobs, *other_logprobs;  // [rows], [rows, width], [pairs]
  int64_t *ranks, *top_ids, *other_ranks;
};

// log of the sum of e^logit: its largest part, and what comes on top of that.
inline std::pair<float, float> norm_of(const float* logits, int64_t num) {
  Vec peaks = broadcast(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) peaks = greater(load(logits + i), peaks);
  float peak = greatest(peaks);
  for (; i < num; ++i) peak = logits[i] > peak ? logits[i] : peak;
  DoubleVec sums = {};
  i = 0;
  for (; i + LANES <= num; i += LANES) sums += __builtin_convertvector(exp(load(logits + i) - peak), DoubleVec);
  double mass = 0.0;
  for (int lane = 0; lane < LANES; ++lane) mass += sums[lane];
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

// The k likeliest: a heap with the least likely in front, passed by whatever is no better.
inline void find_top(const float* logits, int64_t num, int64_t k, std::vector<std::pair<float, int64_t>>& heap) {
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

inline void run(const Scoring& job) {
  std::vector<std::pair<float, int64_t>> heap;
  int64_t pair = 0;
  for (int64_t row = 0; row < job.rows; ++row) {
    const float* logits = job.logits + row * job.vocab;
    const auto [peak, rest] = norm_of(logits, job.vocab);
    const auto logprob = [peak = peak, rest = rest](float logit) { return logit - peak - rest; };
    const float own = logits[job.ids[row]];
    job.logprobs[row] = logprob(own);
    job.ranks[row] = rank_of(logits, job.vocab, own);
    if (job.nums[row] > 0) {
      find_top(logits, job.vocab, job.nums[row], heap);
      for (int64_t i = 0; i < job.nums[row]; ++i) {
        job.top_ids[row * job.width + i] = heap[i].second;
        job.top_logprobs[row * job.width + i] = logprob(heap[i].first);
      }
    }
    for (; pair < job.pairs && job.other_rows[pair] == row; ++pair) {
      const float other = logits[job.others[pair]];
      job.other_logprobs[pair] = logprob(other);
      job.other_ranks[pair] = rank_of(logits, job.vocab, other);
    }
  }
}

}  // namespace sluice
