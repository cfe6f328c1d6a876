// Logits to tokens, row by row: truncation and Gumbel-max as kernels/sampling.py has them, noise as kernels/philox.py.
//
// A row's token depends on that row alone: rows are computed one after the other, each in one fixed order. Noise words
// are those of the twin to the bit; logarithms are not, so that tokens may differ where the two best scores differ by
// less than 1e-5.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "vector.h"

namespace sluice {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr int64_t FEW = 64, MORE = 16;  // values that are sorted first, and how many times as many next

struct Sampling {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const float *temperature, *top_p, *min_p, *typical_p;     // [rows]
  const int64_t *top_k, *seeds, *positions, *outputs;       // [rows]
  int64_t* ids;                                             // [rows], -1 for a row of no usable number
};

// What one row needs in passing; kept from row to row.
struct Scratch {
  std::vector<float> scaled, weights, values, noise;  // scaled and weights padded to whole vectors: -inf and 0
  std::vector<int64_t> kept, calls;
  std::vector<std::pair<double, int64_t>> distances;  // and places in `kept`
};

inline bool any(IntVec lanes) {
  int32_t found = 0;
  for (int lane = 0; lane < LANES; ++lane) found |= lanes[lane];
  return found != 0;
}

inline int64_t padded(int64_t num) { return (num + LANES - 1) / LANES * LANES; }

// ln(x) to two units in the last place (Cephes' polynomial), x positive and normal.
inline Vec log(Vec x) {
  IntVec bits;
  std::memcpy(&bits, &x, sizeof x);
  IntVec power = ((bits >> 23) & 255) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  Vec m;
  std::memcpy(&m, &bits, sizeof m);  // in [0.5, 1)
  const IntVec small = m < 0.707106781186547524f;
  power += small;  // a true lane is -1
  m = (small ? m + m : m) - 1.0f;
  const Vec z = m * m;
  Vec p = broadcast(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Vec e = __builtin_convertvector(power, Vec);
  return m + (m * z * p - e * 2.12194440e-4f - 0.5f * z) + e * 0.693359375f;
}

typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint64_t Wide __attribute__((vector_size(LANES * 8)));

// High and low words of a * m.
inline void multiply(Words a, uint64_t m, Words* high, Words* low) {
  const Wide product = __builtin_convertvector(a, Wide) * m;
  *high = __builtin_convertvector(product >> 32, Words);
  *low = __builtin_convertvector(product, Words);
}

// Philox4x32-10 (Salmon et al., 2011) of LANES counters.
inline void philox(Words c[4], uint64_t seed) {
  uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Words high0, low0, high1, low1;
    multiply(c[0], 0xD2511F53u, &high0, &low0);
    multiply(c[2], 0xCD9E8D57u, &high1, &low1);
    c[0] = high1 ^ c[1] ^ low;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ high;
    c[3] = low0;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// Gumbel noise of uniform words: -log(-log1p(-u)), u = (word + 1/2) / 2^32 kept below 1.
inline Vec gumbel(Words word) {
  Vec u = __builtin_convertvector(word, Vec) * 0x1p-32f + 0x1p-33f;
  u = u > 1.0f - 0x1p-24f ? broadcast(1.0f - 0x1p-24f) : u;
  const Vec rest = 1.0f - u;                                   // rounded: what is lost is put back by the quotient
  const Vec part = rest == 1.0f ? broadcast(1.0f) : 1.0f - rest;
  const Vec e = rest == 1.0f ? u : -log(rest) * (u / part);
  return -log(e);
}

// Noise of ids 4 * calls[i] + word, or 4 * i + word without calls: noise[word * stride + i], for `num` calls, rounded up
// to LANES.
inline void fill_noise(const Sampling& job, int64_t row, const int64_t* calls, int64_t num, float* noise,
                       int64_t stride) {
  for (int64_t at = 0; at < num; at += LANES) {
    Words c[4] = {};
    for (int lane = 0; lane < LANES; ++lane)
      c[0][lane] = static_cast<uint32_t>(calls ? calls[std::min(at + lane, num - 1)] : at + lane);
    c[1] += static_cast<uint32_t>(job.positions[row]);
    c[2] += static_cast<uint32_t>(job.outputs[row]);
    philox(c, static_cast<uint64_t>(job.seeds[row]));
    for (int word = 0; word < 4; ++word) store(noise + word * stride + at, gumbel(c[word]));
  }
}

// The last of the largest values before which less than `share` of `mass` lies; sums run in double, largest first.
inline float nucleus(std::vector<float>& values, double share, double mass) {
  const int64_t num = static_cast<int64_t>(values.size());
  double before = 0.0;
  float last = -INFINITE;
  for (int64_t first = 0, size = FEW; first < num; first += size, size *= MORE) {
    const int64_t end = std::min(first + size, num);
    if (end < num) std::nth_element(values.begin() + first, values.begin() + end, values.end(), std::greater<>());
    std::sort(values.begin() + first, values.begin() + end, std::greater<>());
    for (int64_t i = first; i < end; ++i) {
      if (!(before < share * mass)) return last;
      last = values[i];
      before += static_cast<double>(std::exp(last));
    }
  }
  return last;
}

// Drops from `kept` what is not locally typical (Meister et al. 2022): the ids whose surprise is nearest to the entropy
// of all that is kept stay, until their mass reaches `share`.
inline void keep_typical(Scratch& s, double share) {
  double total = 0.0, mean = 0.0;
  for (const int64_t id : s.kept) total += static_cast<double>(s.weights[id]);
  const double norm = std::log(total);
  for (const int64_t id : s.kept) mean += s.weights[id] / total * (norm - s.scaled[id]);
  const int64_t num = static_cast<int64_t>(s.kept.size());
  s.distances.resize(num);
  for (int64_t i = 0; i < num; ++i) s.distances[i] = {std::abs(norm - s.scaled[s.kept[i]] - mean), i};
  double before = 0.0;
  int64_t stay = 0;
  for (int64_t first = 0, size = FEW; first < num && stay == first; first += size, size *= MORE) {
    const int64_t end = std::min(first + size, num);
    const auto begin = s.distances.begin();
    if (end < num) std::nth_element(begin + first, begin + end, s.distances.end());
    std::sort(begin + first, begin + end);
    while (stay < end && before < share) before += s.weights[s.kept[s.distances[stay++].second]] / total;
  }
  s.calls.resize(stay);
  for (int64_t i = 0; i < stay; ++i) s.calls[i] = s.kept[s.distances[i].second];
  std::sort(s.calls.begin(), s.calls.end());
  s.kept.swap(s.calls);
}

// The ids whose scaled logit is `floor` at least.
inline void find(Scratch& s, float floor) {
  s.kept.clear();
  for (int64_t i = 0; i < static_cast<int64_t>(s.scaled.size()); i += LANES)
    if (any(load(s.scaled.data() + i) >= floor))
      for (int64_t id = i; id < i + LANES; ++id)
        if (s.scaled[id] >= floor && s.scaled[id] > -INFINITE) s.kept.push_back(id);
}

// The least scaled logit that top-k, top-p and min-p keep.
inline float floor_of(const Sampling& job, int64_t row, Scratch& s) {
  const int64_t top_k = job.top_k[row] < job.vocab ? job.top_k[row] : 0;
  float floor = -INFINITE;
  s.values.clear();
  if (top_k > 0) {
    s.values.resize(top_k);
    std::partial_sort_copy(s.scaled.begin(), s.scaled.end(), s.values.begin(), s.values.end(), std::greater<>());
    floor = s.values.back();
  }
  if (job.top_p[row] < 1.0f) {
    double mass = 0.0;
    find(s, std::max(floor, -104.0f));  // below, e^value is 0 in float
    s.values.clear();
    for (const int64_t id : s.kept) {
      s.values.push_back(s.scaled[id]);
      mass += static_cast<double>(s.weights[id]);
    }
    floor = std::max(floor, nucleus(s.values, job.top_p[row], mass));
  }
  return job.min_p[row] > 0.0f ? std::max(floor, std::log(job.min_p[row])) : floor;
}

// Gumbel-max over the kept ids, all of them or those of `kept`; the lowest id of equals.
inline int64_t draw(const Sampling& job, int64_t row, Scratch& s, bool all) {
  const int64_t num = all ? (job.vocab + 3) / 4 : static_cast<int64_t>(s.kept.size()), stride = padded(num);
  s.noise.resize(4 * stride);
  s.calls.clear();
  if (!all)
    for (const int64_t id : s.kept) s.calls.push_back(id >> 2);
  fill_noise(job, row, all ? nullptr : s.calls.data(), num, s.noise.data(), stride);
  float best = -INFINITE;
  int64_t chosen = -1;
  const auto meet = [&](int64_t id, float noise) {
    const float score = s.scaled[id] + noise;
    if (score > best) best = score, chosen = id;
  };
  if (all)
    for (int64_t id = 0; id < job.vocab; ++id) meet(id, s.noise[(id & 3) * stride + (id >> 2)]);
  else
    for (int64_t i = 0; i < num; ++i) meet(s.kept[i], s.noise[(s.kept[i] & 3) * stride + i]);
  return chosen;
}

// The greatest logit; NaN if one is NaN or infinite.
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
  bool is_bad = any(bad);
  for (; i < num; ++i) {
    is_bad |= !(logits[i] < INFINITE);
    found = logits[i] > found ? logits[i] : found;
  }
  return is_bad ? std::numeric_limits<float>::quiet_NaN() : found;
}

// What is left of logits when the peak is 0 and the temperature 1, and e to the power of it where that is asked for.
inline void scale(const float* logits, int64_t num, float peak, float temperature, bool weighs, Scratch& s) {
  s.scaled.resize(padded(num));
  std::fill(s.scaled.begin() + num, s.scaled.end(), -INFINITE);
  for (int64_t i = 0; i < num; ++i) s.scaled[i] = (logits[i] - peak) / temperature;
  if (!weighs) return;
  s.weights.resize(padded(num));
  for (int64_t i = 0; i < num; i += LANES) store(s.weights.data() + i, exp(load(s.scaled.data() + i)));
}

inline int64_t sample_row(const Sampling& job, int64_t row, Scratch& s) {
  const float* logits = job.logits + row * job.vocab;
  const float peak = peak_of(logits, job.vocab);
  if (!(peak > -INFINITE)) return -1;
  if (!(job.temperature[row] > 0.0f)) return std::find(logits, logits + job.vocab, peak) - logits;
  const bool is_typical = job.typical_p[row] < 1.0f;
  scale(logits, job.vocab, peak, job.temperature[row], is_typical || job.top_p[row] < 1.0f, s);
  const float floor = floor_of(job, row, s);
  if (floor == -INFINITE && !is_typical) return draw(job, row, s, true);
  find(s, floor);
  if (is_typical) keep_typical(s, job.typical_p[row]);
  return draw(job, row, s, false);
}

inline void run(const Sampling& job) {
  Scratch scratch;
  for (int64_t row = 0; row < job.rows; ++row) job.ids[row] = sample_row(job, row, scratch);
}

}  // namespace sluice
