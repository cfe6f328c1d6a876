// Gumbel noise keyed by (seed, position, output, id). The random words equal those of kernels/reference/philox.py to
// the bit; their logarithms may differ in the last places.
#pragma once

#include <algorithm>
#include <cstdint>

#include "exponentials.h"
#include "lanes.h"

namespace sluice {

// The key of one row's noise; the id is the counter.
struct Key {
  uint64_t seed;
  uint32_t position, output;
};

// Computes the high and low words of a * m.
inline void multiply(Words a, uint64_t m, Words* high, Words* low) {
  Wide pairs;
  std::memcpy(&pairs, &a, sizeof pairs);
  const Wide by = Wide{} + m, even = multiply_low(pairs, by), odd = multiply_low(pairs >> 32, by);
  const Wide highs = (even >> 32) | (odd & 0xffffffff00000000u), lows = (even & 0xffffffffu) | (odd << 32);
  std::memcpy(high, &highs, sizeof highs);
  std::memcpy(low, &lows, sizeof lows);
}

// Philox4x32-10 (Salmon et al., 2011) of LANES counters: the random words of ids 4 * call to 4 * call + 3, for each
// call.
inline void philox(Words calls, const Key& key, Words c[4]) {
  c[0] = calls;
  c[1] = Words{} + key.position;
  c[2] = Words{} + key.output;
  c[3] = Words{};
  uint32_t low = static_cast<uint32_t>(key.seed), high = static_cast<uint32_t>(key.seed >> 32);
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
  const Vec rest = 1.0f - u;  // rounded; the factor u / part below corrects the error
  const Vec part = rest == 1.0f ? broadcast(1.0f) : 1.0f - rest;
  const Vec e = rest == 1.0f ? u : -log(rest) * (u / part);
  return -log(e);
}

// Returns bounds of random words: a word above its bound gives less noise than `least`. About one in 1e5 of the words
// below the bound does too.
inline Words greatest_words(Vec least) {
  const Vec e = exp(-least), exact = 1.0f - exp(-e) + 1e-6f;  // nearly e, and never more, if e is small
  const Vec scaled = (e < exact ? e : exact) * (1.0f + 1e-5f) * 0x1p32f + 1.0f;
  return __builtin_convertvector(scaled < 4294967040.0f ? scaled : broadcast(4294967040.0f), Words);
}

// Writes the noise of `num` ids, rounded up to a multiple of LANES.
inline void fill_noise(const Key& key, const int64_t* ids, int64_t num, float* noise) {
  for (int64_t at = 0; at < num; at += LANES) {
    Words calls, which, c[4];
    for (int lane = 0; lane < LANES; ++lane) {
      const uint32_t id = static_cast<uint32_t>(ids[std::min<int64_t>(at + lane, num - 1)]);
      calls[lane] = id >> 2;
      which[lane] = id & 3;
    }
    philox(calls, key, c);
    store(noise + at, gumbel(which < 2 ? (which == 0 ? c[0] : c[1]) : (which == 2 ? c[2] : c[3])));
  }
}

}  // namespace sluice
