// The activations and norms of encoders, row by row in place or into other rows.
//
// The result of a number depends on its row only: the end of a row is computed as a whole vector, too.
#pragma once

#include <algorithm>

#include "panels.h"

namespace sluice {

enum class Activation { GELU, GELU_TANH, QUICK_GELU, RELU, SILU, TANH };  // as in kernels/cpu/native_encoders.py

// What is left of 1 behind erf(x), of x >= 0, to 2e-7 of itself (Press et al. 1992, Numerical Recipes' Chebyshev fit).
inline Vec error_left(Vec x) {
  const Vec t = 1.0f / (1.0f + 0.5f * x);
  Vec p = broadcast(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * exp(p - x * x);
}

// x · (1 + erf(x / √2)) / 2
inline Vec gelu(Vec x) {
  const Vec half = 0.5f * error_left(absolute(x) * 0.70710678f);
  return x * (x < 0.0f ? half : 1.0f - half);
}

inline Vec times_sigmoid(Vec x, Vec power) { return x / (1.0f + exp(-power)); }

template <typename Function>
inline void each_number(float* x, int64_t num, const Function& function) {
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) store(x + i, function(load(x + i)));
  if (i == num) return;
  float rest[LANES] = {};
  std::copy(x + i, x + num, rest);
  store(rest, function(load(rest)));
  std::copy(rest, rest + (num - i), x + i);
}

// Replaces `num` numbers by their activations. NaN stays NaN.
[[gnu::noinline]] inline void activate(Activation activation, float* x, int64_t num) {
  switch (activation) {
    case Activation::GELU: return each_number(x, num, gelu);
    case Activation::GELU_TANH: return each_number(x, num, [](Vec v) { return times_sigmoid(v, gelu_power(v)); });
    case Activation::QUICK_GELU: return each_number(x, num, [](Vec v) { return times_sigmoid(v, v * 1.702f); });
    case Activation::RELU: return each_number(x, num, [](Vec v) { return v < 0.0f ? Vec{} : v; });
    case Activation::SILU: return each_number(x, num, [](Vec v) { return times_sigmoid(v, v); });
    case Activation::TANH: return each_number(x, num, [](Vec v) { return tanh(v); });
  }
}

// A norm of rows: LayerNorm (Ba et al. 2016), or that by the root of the mean square (Zhang & Sennrich 2019).
struct RowNorm {
  bool is_root;
  const float* weight;
  const float* bias;  // or null
  float eps;
};

// Of a row: what is taken off each number, and by what it is multiplied then.
struct Spread {
  float mean, scale;
};

inline Spread spread_of(const float* x, int64_t k, float eps) {
  Vec totals{};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) totals += load(x + i);
  float total = sum(totals);
  for (; i < k; ++i) total += x[i];
  const float mean = total / static_cast<float>(k);
  Vec squares{};
  for (i = 0; i + LANES <= k; i += LANES) {
    const Vec off = load(x + i) - mean;
    squares += off * off;
  }
  float square = sum(squares);
  for (; i < k; ++i) square += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt(square / static_cast<float>(k) + eps)};
}

// to [k] = the norm of x [k]
inline void norm_row(const RowNorm& norm, const float* x, int64_t k, float* to) {
  const auto [mean, scale] = norm.is_root ? Spread{0.0f, norm_scale(x, k, norm.eps)} : spread_of(x, k, norm.eps);
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    const Vec value = (load(x + i) - mean) * scale * load(norm.weight + i);
    store(to + i, norm.bias == nullptr ? value : value + load(norm.bias + i));
  }
  for (; i < k; ++i) {
    const float value = (x[i] - mean) * scale * norm.weight[i];
    to[i] = norm.bias == nullptr ? value : value + norm.bias[i];
  }
}

// Activations of rows, each `width` numbers without a gap, in place.
struct Activate {
  Activation activation;
  float* x;
  int64_t rows, width;
};

inline void run(const Activate& job) {
  each_row(job.rows, job.width, [&](int64_t row) { activate(job.activation, job.x + row * job.width, job.width); });
}

// to [rows, width] = the norms of x [rows, width]
struct NormRows {
  RowNorm norm;
  const float* x;
  float* to;
  int64_t rows, width;
};

inline void run(const NormRows& job) {
  each_row(job.rows, job.width,
           [&](int64_t row) { norm_row(job.norm, job.x + row * job.width, job.width, job.to + row * job.width); });
}

}  // namespace sluice
