// The whole path from a row's logits to its token, while the logits are in the processor's cache: scores alternatives,
// adjusts logits, samples a token and scores it. Each row is one piece of a thread pool's job; results do not depend on
// the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "adjust.h"
#include "pool.h"
#include "sampling.h"
#include "scores.h"

namespace sluice {

struct Choice {
  float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  Sampling sampling;
  Changes changes;
  Listed asked;  // the rows to score, by their logits before adjustment
  Scoring scoring;
};

// Scores given ids.
struct Given {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const int64_t* ids;  // [rows]
  Scoring scoring;
};

// Buffers of one thread, reused from row to row.
struct ChoiceWorkspace {
  Scratch scratch;
  Heap heap;
  std::vector<float> raw;

  static ChoiceWorkspace& own() {
    thread_local ChoiceWorkspace workspace;
    return workspace;
  }
};

// Samples a row of which a mask allows few ids, without looking at the logits of others; returns whether it is one. If
// none of its ids can be drawn, all others become -inf, as callers expect.
inline bool choose_of_few(const Choice& job, int64_t row, float* logits, Scratch& scratch) {
  if (truncates(job.sampling, row) || !list_allowed(job.changes, row, job.vocab, scratch.kept)) return false;
  adjust(job.changes, row, logits);
  job.sampling.ids[row] = sample_kept(job.sampling, row, logits, job.vocab, scratch);
  if (job.sampling.ids[row] < 0) mask(job.changes, row, logits, job.vocab);
  return true;
}

inline void choose_row(const Choice& job, int64_t row) {
  ChoiceWorkspace& workspace = ChoiceWorkspace::own();
  float* logits = job.logits + row * job.vocab;
  const int64_t at = job.asked.find(row);
  if (at < 0 && choose_of_few(job, row, logits, workspace.scratch)) return;
  const float* raw = logits;
  Norm norm = {};
  if (at >= 0) {
    norm = norm_of(logits, job.vocab);
    score_rivals(job.scoring, at, logits, job.vocab, norm, workspace.heap);
    if (touches(job.changes, row)) {
      workspace.raw.assign(logits, logits + job.vocab);
      raw = workspace.raw.data();
    }
  }
  mask(job.changes, row, logits, job.vocab);
  adjust(job.changes, row, logits);
  const int64_t id = sample_row(job.sampling, row, logits, job.vocab, workspace.scratch);
  job.sampling.ids[row] = id;
  if (at >= 0) score_own(job.scoring, at, raw, job.vocab, norm, id);
}

// Calls work(row) for each row in the order of `rows`, on several threads unless there is little work.
template <typename Work>
void each_row(const std::vector<int64_t>& rows, int64_t vocab, const Work& work) {
  if (static_cast<int64_t>(rows.size()) * vocab < SMALL) {
    for (const int64_t row : rows) work(row);
  } else {
    Pool::instance().run(static_cast<int>(rows.size()), [&](int piece) { work(rows[piece]); });
  }
}

inline std::vector<int64_t> count(int64_t num) {
  std::vector<int64_t> rows(num);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Samples all rows. The most expensive rows come first, so that the threads end at about the same time.
inline void run(Choice& job) {
  const Sampling& by = job.sampling;
  std::vector<int64_t> costs(job.rows);
  for (int64_t row = 0; row < job.rows; ++row) {
    const int64_t truncation = by.top_p[row] < 1.0f ? 3 : 2;
    costs[row] = by.temperature[row] > 0.0f ? (by.typical_p[row] < 1.0f ? 4 : truncation) : 0;
    costs[row] += job.asked.find(row) >= 0 ? 2 : 0;
  }
  std::vector<int64_t> rows = count(job.rows);
  std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
  each_row(rows, job.vocab, [&](int64_t row) { choose_row(job, row); });
}

inline void run(const Given& job) {
  each_row(count(job.rows), job.vocab, [&](int64_t row) {
    const float* logits = job.logits + row * job.vocab;
    const Norm norm = norm_of(logits, job.vocab);
    score_rivals(job.scoring, row, logits, job.vocab, norm, ChoiceWorkspace::own().heap);
    score_own(job.scoring, row, logits, job.vocab, norm, job.ids[row]);
  });
}

}  // namespace sluice
