// A layer's experts as one call (mixture of experts, Shazeer et al. 2017): a router chooses some of them for each
// token, and the sum of their results, weighted by their shares, is added to the residual stream.
//
// Rows of one expert lie side by side, and one pass shares out the panels of all experts that have rows. A row is
// prepared for products once, whoever multiplies it, and gives to the bit what its expert gives as a dense layer.
#pragma once

#include "expert_rows.h"
#include "packed.h"

namespace sluice {

constexpr int64_t TOKENS_A_PASS = 1024;  // of which each has a row for every expert of its: what is kept between passes

// A weight and its bias or null.
struct Matrix {
  const void* weight;
  const float* bias;
};

struct Expert {
  Matrix gate_up, down;
};

// Numbers of 64 bits, in the order of engine/models/layers/experts.py.
struct Router {
  int64_t format;
  Matrix matrix;
  int64_t inputs, experts;
  const float* norm;
  int64_t per_token, renormalises;

  // The matrices of experts that are held follow.
  const Expert* each() const { return reinterpret_cast<const Expert*>(this + 1); }

  Packed linear() const { return {static_cast<Format>(format), matrix.weight, matrix.bias, inputs, experts, norm}; }
};

struct Experts {
  Packed gate_up, down;  // of the first; the others differ in where they lie
  Finish gate;
  float eps;
  const Router* router;
  const float* h;  // [T, hidden]
  float* to;       // [T, hidden], which the result is added to; may be h
  int64_t tokens;
  int64_t first, held;  // experts that are computed: further ones may be another rank's
};

constexpr int32_t ELSEWHERE = -1;  // the place of a choice whose expert is not held

// Logits [num] become shares: a softmax. What follows them, up to a whole vector, is overwritten.
inline void softmax(float* logits, int64_t num) {
  const int64_t end = (num + LANES - 1) / LANES * LANES;
  std::fill(logits + num, logits + end, -std::numeric_limits<float>::infinity());
  Vec top = load(logits), total{};
  for (int64_t i = LANES; i < end; i += LANES) top = greater(load(logits + i), top);
  const float greatest_one = greatest(top);
  for (int64_t i = 0; i < end; i += LANES) {
    const Vec power = exp(load(logits + i) - greatest_one);
    total += power;
    store(logits + i, power);
  }
  const float all = sum(total);
  for (int64_t i = 0; i < end; i += LANES) store(logits + i, load(logits + i) / all);
}

// The first `kept` of so many shares, greatest first and of equal ones the first; NaN is equal to everything.
inline void choose_experts(const float* shares, int64_t num, int64_t kept, int32_t* experts, float* best) {
  for (int64_t expert = 0; expert < num; ++expert) {
    if (expert >= kept && !(shares[expert] > best[kept - 1])) continue;
    int64_t at = std::min(expert, kept - 1);
    for (; at > 0 && shares[expert] > best[at - 1]; --at) best[at] = best[at - 1], experts[at] = experts[at - 1];
    best[at] = shares[expert], experts[at] = static_cast<int32_t>(expert);
  }
}

// Experts and shares of each token, [T, per_token].
inline void route(const Experts& job, int32_t* experts, float* shares) {
  static thread_local Workspace<float> workspace;
  const Router& router = *job.router;
  const int64_t kept = router.per_token, stride = row_stride(router.experts);
  const Rows logits{workspace.fit(job.tokens * stride), stride};
  apply(router.linear(), {const_cast<float*>(job.h), router.inputs}, job.tokens, job.eps, Finish::STORE, logits);
  each_row(job.tokens, router.experts * 4, [&](int64_t token) {
    float* own = shares + token * kept;
    softmax(logits[token], router.experts);
    choose_experts(logits[token], router.experts, kept, experts + token * kept, own);
    if (router.renormalises == 0) return;
    float all = own[0];
    for (int64_t i = 1; i < kept; ++i) all += own[i];
    for (int64_t i = 0; i < kept; ++i) own[i] /= all;
  });
}

// Where choices of experts that are held go: rows by expert, and those of one expert in the order of their tokens.
inline std::vector<Group> group_choices(const Experts& job, const int32_t* experts, int64_t choices, int32_t* places) {
  std::vector<int32_t> next(job.held);
  const auto held = [&](int64_t choice) { return experts[choice] - job.first; };
  const auto is_held = [&](int64_t choice) { return held(choice) >= 0 && held(choice) < job.held; };
  for (int64_t choice = 0; choice < choices; ++choice)
    if (is_held(choice)) ++next[held(choice)];
  std::vector<Group> groups;
  int64_t pieces = 0;
  int32_t begin = 0;
  for (int64_t expert = 0; expert < job.held; ++expert) {
    const int32_t rows = next[expert];
    next[expert] = begin;
    if (rows == 0) continue;
    groups.push_back({expert, begin, begin + rows, pieces});
    pieces += groups.back().pieces(), begin += rows;
  }
  for (int64_t choice = 0; choice < choices; ++choice)
    places[choice] = is_held(choice) ? next[held(choice)]++ : ELSEWHERE;
  return groups;
}

// Rows of x, and each one's places, some of them maybe ELSEWHERE; none where rows are in order already.
struct Sources {
  Rows x;
  int64_t num, places_each;
  const int32_t* places;

  int64_t place(int64_t row, int64_t i) const { return places == nullptr ? row : places[row * places_each + i]; }
};

// A linear of each expert that has rows.
struct Each {
  const Packed& first;
  Matrix Expert::* which;
  const Expert* experts;
  const std::vector<Group>& groups;
};

template <typename Form>
inline void multiply_each(const Each& linears, const Sources& from, float eps, const Output& to) {
  using Job = typename Form::Job;
  using Weight = decltype(Job::weight);
  const Packed& first = linears.first;
  const Job job{from.x.first, from.x.stride, first.inputs, nullptr, eps, first.norm, to};
  const Form rows(job, from.places == nullptr);
  if (from.places != nullptr || Form::CHANGES_ALL)
    each_row(from.num, job.k * from.places_each, [&](int64_t row) {
      int64_t taken = ELSEWHERE;
      for (int64_t i = 0; i < from.places_each; ++i) {
        const int64_t place = from.place(row, i);
        if (place == ELSEWHERE) continue;
        if (taken == ELSEWHERE) rows.take(job, row, taken = place);
        else rows.copy(taken, place);
      }
    });
  each_piece(linears.groups, to, job.k, [&](int64_t expert, int64_t panel, int64_t begin, int64_t end) {
    const Matrix& matrix = linears.experts[expert].*linears.which;
    Job own = job;
    own.weight = static_cast<Weight>(matrix.weight), own.to.bias = matrix.bias;
    rows.compute(own, panel, begin, end);
  });
}

// y [places, ..] = what `finish` makes of rows of x by their places' experts; see `apply`.
inline void apply_each(const Each& linears, const Sources& from, float eps, Finish finish, Rows y) {
  const int64_t outputs = linears.first.outputs;
  const Output to{nullptr, y.first, y.stride, from.num * from.places_each, is_gate(finish) ? outputs / 2 : outputs,
                  finish};
  switch (linears.first.format) {
    case Format::FLOAT32: return multiply_each<FloatRows<float>>(linears, from, eps, to);
    case Format::BFLOAT16: return multiply_each<FloatRows<uint16_t>>(linears, from, eps, to);
    case Format::INT8: return multiply_each<IntegerRows<8, false>>(linears, from, eps, to);
    case Format::INT8_AFFINE: return multiply_each<IntegerRows<8, true>>(linears, from, eps, to);
    case Format::INT4: return multiply_each<IntegerRows<4, false>>(linears, from, eps, to);
    case Format::INT4_AFFINE: return multiply_each<IntegerRows<4, true>>(linears, from, eps, to);
  }
}

// h [T, width] += the sum of each token's rows of y by its shares, the likeliest expert's first.
inline void add_shares(const Sources& to, const float* shares, Rows y, int64_t width) {
  each_row(to.num, width * to.places_each, [&](int64_t token) {
    float* h = to.x[token];
    const float* own = shares + token * to.places_each;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      Vec total{};
      for (int64_t j = 0; j < to.places_each; ++j)
        if (to.place(token, j) != ELSEWHERE) total += load(y[to.place(token, j)] + i) * own[j];
      store(h + i, load(h + i) + total);
    }
    for (; i < width; ++i) {
      float total = 0.0f;
      for (int64_t j = 0; j < to.places_each; ++j)
        if (to.place(token, j) != ELSEWHERE) total += y[to.place(token, j)][i] * own[j];
      h[i] += total;
    }
  });
}

// Of so many tokens at once.
inline void add_experts(const Experts& job) {
  static thread_local Workspace<int32_t> chosen;
  static thread_local Workspace<float> weighed;
  constexpr float no_norm = -1.0f;
  const Router& router = *job.router;
  const int64_t hidden = router.inputs, choices = job.tokens * router.per_token;
  int32_t *experts = chosen.fit(2 * choices), *places = experts + choices;
  float* shares = weighed.fit(choices);
  route(job, experts, shares);
  const std::vector<Group> groups = group_choices(job, experts, choices, places);
  if (groups.empty()) return;
  const auto [gated, found] = rows_of<2>(choices, {job.down.inputs, hidden});
  const Rows h{const_cast<float*>(job.h), hidden};
  const Sources tokens{h, job.tokens, router.per_token, places}, rows{gated, groups.back().end, 1, nullptr};
  apply_each({job.gate_up, &Expert::gate_up, router.each(), groups}, tokens, job.eps, job.gate, gated);
  apply_each({job.down, &Expert::down, router.each(), groups}, rows, no_norm, Finish::STORE, found);
  add_shares({{job.to, hidden}, job.tokens, router.per_token, places}, shares, found, hidden);
}

inline void run(const Experts& job) {
  for (int64_t first = 0; first < job.tokens; first += TOKENS_A_PASS) {
    Experts part = job;
    part.h += first * job.router->inputs, part.to += first * job.router->inputs;
    part.tokens = std::min(job.tokens - first, TOKENS_A_PASS);
    add_experts(part);
  }
}

}  // namespace sluice
