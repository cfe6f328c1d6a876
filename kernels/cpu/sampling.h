// Samples one token per row of logits: truncation and Gumbel-max as in kernels/reference/sampling.py, noise as in
// kernels/reference/philox.py.
//
// A row's token depends on that row alone, which is computed in one fixed order. The random words equal those of the
// reference to the bit; the logarithms do not, so that tokens may differ where the two best scores differ by less than
// 1e-5. Ids whose random word cannot make them win are skipped before any logarithm is computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "noise.h"
#include "truncation.h"

namespace sluice {

constexpr int64_t GROUP = 4 * LANES;  // ids whose random words one call of `philox` computes

struct Sampling {
  const float *temperature, *top_p, *min_p, *typical_p;  // [rows]
  const int64_t *top_k, *seeds, *positions, *outputs;    // [rows]
  int64_t* ids;                                          // [rows], -1 for a row without a usable logit
};

inline int64_t padded(int64_t num, int64_t to) { return (num + to - 1) / to * to; }

// The best score so far and its id; the lowest id of equal scores.
struct Best {
  float score = -INFINITE;
  int64_t id = -1;

  void meet(float other, int64_t at) {
    if (other > score || (other == score && at < id)) score = other, id = at;
  }
};

// Compares `best` with the ids of group `group` whose random words are at most `most`.
inline void meet_group(const Key& key, const float* scaled, int64_t group, uint32_t most, Best& best) {
  Words calls, c[4];
  for (int lane = 0; lane < LANES; ++lane) calls[lane] = static_cast<uint32_t>(group * LANES + lane);
  philox(calls, key, c);
  for (int word = 0; word < 4; ++word) {
    uint32_t left = bits_of(c[word] <= most);
    if (!left) continue;
    const Vec noise = gumbel(c[word]);
    for (; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      const int64_t id = group * GROUP + 4 * lane + word;
      if (scaled[id] > -INFINITE) best.meet(scaled[id] + noise[lane], id);
    }
  }
}

// Gumbel-max over all ids: first the group with the greatest logit, then each group that could beat the best so far.
inline int64_t draw_from_all(const Key& key, Scratch& s) {
  const int64_t groups = static_cast<int64_t>(s.scaled.size()) / GROUP;
  s.values.assign(padded(groups, LANES), -INFINITE);  // greatest scaled logit of each group
  int64_t first = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const float* from = s.scaled.data() + group * GROUP;
    Vec peak = load(from);
    for (int64_t i = LANES; i < GROUP; i += LANES) peak = greater(load(from + i), peak);
    s.values[group] = greatest(peak);
    if (s.values[group] > s.values[first]) first = group;
  }
  Best best;
  meet_group(key, s.scaled.data(), first, ~0u, best);
  for (int64_t at = 0; at < groups; at += LANES) {
    const Words most = greatest_words(best.score - load(s.values.data() + at));
    for (int64_t group = at; group < std::min(at + LANES, groups); ++group)
      if (group != first && s.values[group] > -INFINITE)
        meet_group(key, s.scaled.data(), group, most[group - at], best);
  }
  return best.id;
}

// Gumbel-max over `kept`.
inline int64_t draw_from_kept(const Key& key, Scratch& s) {
  const int64_t num = static_cast<int64_t>(s.kept.size());
  s.noise.resize(padded(num, LANES));
  fill_noise(key, s.kept.data(), num, s.noise.data());
  Best best;
  for (int64_t i = 0; i < num; ++i) best.meet(s.scaled[s.kept[i]] + s.noise[i], s.kept[i]);
  return best.id;
}

// Returns the greatest logit; NaN if any logit is NaN or plus infinity.
inline float peak_of(const float* logits, int64_t num) {
  Vec peak = broadcast(-INFINITE);
  IntVec bad = {};
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) {
    const Vec v = load(logits + i);
    bad |= ~(v < INFINITE);
    peak = greater(v, peak);
  }
  float found = greatest(peak);
  bool is_bad = bits_of(bad) != 0;
  for (; i < num; ++i) {
    is_bad |= !(logits[i] < INFINITE);
    found = logits[i] > found ? logits[i] : found;
  }
  return is_bad ? std::numeric_limits<float>::quiet_NaN() : found;
}

// Computes scaled = (logits - peak) / temperature, and weights = e^scaled if `weighs`.
inline void scale(const float* logits, int64_t num, float peak, float temperature, bool weighs, Scratch& s) {
  s.scaled.resize(padded(num, GROUP));
  float* scaled = s.scaled.data();
  const float by = 1.0f / temperature;
  if (by < INFINITE) {  // a multiplication is ten times as fast as a division
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) store(scaled + i, (load(logits + i) - peak) * by);
    for (; i < num; ++i) scaled[i] = (logits[i] - peak) * by;
  } else {
    for (int64_t i = 0; i < num; ++i) scaled[i] = (logits[i] - peak) / temperature;
  }
  std::fill(s.scaled.begin() + num, s.scaled.end(), -INFINITE);
  if (!weighs) return;
  s.weights.resize(s.scaled.size());
  for (int64_t i = 0; i < static_cast<int64_t>(s.scaled.size()); i += LANES)
    store(s.weights.data() + i, exp(load(scaled + i)));
}

// Returns the first index whose logit equals `peak`; there must be one.
inline int64_t first_of(const float* logits, int64_t num, float peak) {
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES)
    if (const uint32_t found = bits_of(load(logits + i) == peak)) return i + __builtin_ctz(found);
  while (logits[i] != peak) ++i;
  return i;
}

// Returns the least scaled logit that top-k, top-p and min-p keep.
inline float floor_of(const Sampling& job, int64_t row, int64_t vocab, Scratch& s) {
  const int64_t top_k = job.top_k[row] < vocab ? job.top_k[row] : 0;
  float floor = top_k > 0 ? kth(s, top_k, vocab) : -INFINITE;
  if (job.top_p[row] < 1.0f) floor = std::max(floor, top_p_floor(s, floor, job.top_p[row]));
  return job.min_p[row] > 0.0f ? std::max(floor, std::log(job.min_p[row])) : floor;
}

inline Key key_of(const Sampling& job, int64_t row) {
  return {static_cast<uint64_t>(job.seeds[row]), static_cast<uint32_t>(job.positions[row]),
          static_cast<uint32_t>(job.outputs[row])};
}

// Whether some of a row's ids are left out for being unlikely.
inline bool truncates(const Sampling& job, int64_t row) {
  return job.top_k[row] > 0 || job.top_p[row] < 1.0f || job.min_p[row] > 0.0f || job.typical_p[row] < 1.0f;
}

// Samples one of `kept`, ascending, for a row that truncates nothing: the token that `sample_row` would draw if all
// other logits were -inf. -1 if none of their logits is usable.
inline int64_t sample_kept(const Sampling& job, int64_t row, const float* logits, int64_t vocab, Scratch& s) {
  float peak = -INFINITE;
  for (const int64_t id : s.kept) {
    if (!(logits[id] < INFINITE)) return -1;
    peak = std::max(peak, logits[id]);
  }
  if (!(peak > -INFINITE)) return -1;
  if (s.kept.size() == 1) return s.kept.front();
  const float temperature = job.temperature[row], by = 1.0f / temperature;
  if (!(temperature > 0.0f))
    return *std::find_if(s.kept.begin(), s.kept.end(), [&](int64_t id) { return logits[id] == peak; });
  s.scaled.resize(padded(vocab, GROUP));
  for (const int64_t id : s.kept)
    s.scaled[id] = by < INFINITE ? (logits[id] - peak) * by : (logits[id] - peak) / temperature;
  return draw_from_kept(key_of(job, row), s);
}

// Samples a token from logits [vocab] with the parameters of `row`; -1 if no logit is usable.
inline int64_t sample_row(const Sampling& job, int64_t row, const float* logits, int64_t vocab, Scratch& s) {
  const float peak = peak_of(logits, vocab);
  if (!(peak > -INFINITE)) return -1;
  if (!(job.temperature[row] > 0.0f)) return first_of(logits, vocab, peak);
  const Key key = key_of(job, row);
  const bool is_typical = job.typical_p[row] < 1.0f;
  scale(logits, vocab, peak, job.temperature[row], is_typical || job.top_p[row] < 1.0f, s);
  const float floor = floor_of(job, row, vocab, s);
  if (floor == -INFINITE && !is_typical) return draw_from_all(key, s);
  if (is_typical) {
    find_typical(s, floor, job.typical_p[row]);
  } else {
    s.kept.clear();
    each_above(s.scaled.data(), static_cast<int64_t>(s.scaled.size()), floor,
               [&](int64_t id) { s.kept.push_back(id); });
  }
  return draw_from_kept(key, s);
}

}  // namespace sluice
