// Truncation of one row, as in kernels/reference/sampling.py: top-k, top-p and min-p give a least scaled logit that is
// kept, typical-p a band of them. Unlikely ids are examined only if the likely ones do not decide.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "lanes.h"

namespace sluice {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr int64_t FEW = 64;         // up to this many candidates are sorted; more are bisected first
constexpr float NEAR = 16.0f;       // distance within which nearly all of the mass lies
constexpr float FARTHEST = 104.0f;  // distance beyond which e^-distance is 0 in float32
constexpr int64_t HEAP = 128;       // greatest k for which `kth` uses a heap

// Buffers of one row, reused for the next.
struct Scratch {
  std::vector<float> scaled, weights, distances;  // padded to whole vectors with -inf, 0 and inf
  std::vector<float> values, noise;
  std::vector<int64_t> kept;
  std::vector<std::pair<float, int64_t>> band;  // distances and ids
};

// Returns the k-th largest scaled logit, 0 < k < num.
inline float kth(Scratch& s, int64_t k, int64_t num) {
  const float* from = s.scaled.data();
  if (k > HEAP) {
    s.values.assign(from, from + num);
    std::nth_element(s.values.begin(), s.values.begin() + (k - 1), s.values.end(), std::greater<>());
    return s.values[k - 1];
  }
  s.values.assign(from, from + k);
  std::make_heap(s.values.begin(), s.values.end(), std::greater<>());
  for (int64_t at = k; at < num; at += LANES) {  // the last vector may reach over the end of the row into the padding
    const int64_t from_here = std::min(at, static_cast<int64_t>(s.scaled.size()) - LANES);
    uint32_t left = bits_of(load(from + from_here) > s.values.front()) & (~0u << (at - from_here));
    for (; left; left &= left - 1) {
      const float value = from[from_here + __builtin_ctz(left)];
      if (value <= s.values.front()) continue;
      std::pop_heap(s.values.begin(), s.values.end(), std::greater<>());
      s.values.back() = value;
      std::push_heap(s.values.begin(), s.values.end(), std::greater<>());
    }
  }
  return s.values.front();
}

// Returns the weight and the number of the ids whose distance is at most `reach`.
inline std::pair<double, int64_t> within(const Scratch& s, float reach) {
  Sums sums;
  int64_t count = 0;
  for (int64_t at = 0; at < static_cast<int64_t>(s.distances.size()); at += LANES) {
    const IntVec is_near = load(s.distances.data() + at) <= reach;
    sums.add(is_near ? load(s.weights.data() + at) : Vec{});
    count += __builtin_popcount(bits_of(is_near));
  }
  return {sums.all(), count};
}

// Keeps the nearest ids until they hold `share` of the weight. Returns the distance up to which all ids are kept, and
// leaves the kept ids beyond it in `band`, nearest first, the lowest id of equals first. Bisection leaves few ids to
// sort.
inline float nearest(Scratch& s, double share) {
  const double enough = share * total(s.weights.data(), static_cast<int64_t>(s.weights.size()));
  float low = -1.0f, high = NEAR;
  double before = 0.0;
  auto [mass_high, num_high] = within(s, high);
  int64_t num_low = 0;
  if (mass_high < enough) low = NEAR, before = mass_high, num_low = num_high;
  if (mass_high < enough) high = FARTHEST, num_high = within(s, high).second;
  while (num_high - num_low > FEW) {
    const float middle = 0.5f * (low + high);
    if (!(low < middle && middle < high)) break;  // the ids left have the same distance
    const auto [mass, count] = within(s, middle);
    if (mass < enough) low = middle, before = mass, num_low = count;
    else high = middle, num_high = count;
  }
  s.band.clear();
  for (int64_t at = 0; at < static_cast<int64_t>(s.distances.size()); at += LANES) {
    const Vec here = load(s.distances.data() + at);
    for (uint32_t left = bits_of((here > low) & (here <= high)); left; left &= left - 1) {
      const int64_t id = at + __builtin_ctz(left);
      s.band.push_back({s.distances[id], id});
    }
  }
  std::sort(s.band.begin(), s.band.end());
  size_t kept = 0;
  while (kept < s.band.size() && before < enough) before += static_cast<double>(s.weights[s.band[kept++].second]);
  s.band.resize(kept);
  return low;
}

// Sets the weights of ids below `floor` to 0.
inline void weigh_from(Scratch& s, float floor) {
  for (int64_t at = 0; at < static_cast<int64_t>(s.scaled.size()); at += LANES)
    store(s.weights.data() + at, load(s.scaled.data() + at) >= floor ? load(s.weights.data() + at) : Vec{});
}

// Returns the least scaled logit of the nucleus (top-p) of the ids at `floor` or above; ids equal to it are kept too.
inline float top_p_floor(Scratch& s, float floor, double share) {
  if (floor > -INFINITE) weigh_from(s, floor);
  s.distances.resize(s.scaled.size());
  for (int64_t at = 0; at < static_cast<int64_t>(s.scaled.size()); at += LANES) {
    const Vec here = load(s.scaled.data() + at);
    store(s.distances.data() + at, here >= floor ? -here : broadcast(INFINITE));
  }
  const float all = nearest(s, share);
  return -(s.band.empty() ? all : s.band.back().first);
}

// Leaves in `kept` the locally typical ids (Meister et al. 2022) at `floor` or above: those whose surprise is nearest
// to the entropy, until their mass reaches `share`.
inline void find_typical(Scratch& s, float floor, double share) {
  weigh_from(s, std::max(floor, -FARTHEST));
  const int64_t num = static_cast<int64_t>(s.scaled.size());
  Sums sums;
  for (int64_t at = 0; at < num; at += LANES) {
    const Vec weights = load(s.weights.data() + at), scaled = load(s.scaled.data() + at);
    sums.add(weights > 0.0f ? weights * scaled : Vec{});
  }
  const float centre = static_cast<float>(sums.all() / total(s.weights.data(), num));  // scaled logit of mean surprise
  s.distances.resize(num);
  for (int64_t at = 0; at < num; at += LANES) {
    const Vec here = load(s.scaled.data() + at), off = here - centre;
    store(s.distances.data() + at, here >= floor ? (off < 0.0f ? -off : off) : broadcast(INFINITE));
  }
  const float all = nearest(s, share);
  s.kept.clear();
  for (int64_t at = 0; at < num; at += LANES)
    for (uint32_t left = bits_of(load(s.distances.data() + at) <= all); left; left &= left - 1)
      s.kept.push_back(at + __builtin_ctz(left));
  for (const auto& [distance, id] : s.band) s.kept.push_back(id);
}

}  // namespace sluice
