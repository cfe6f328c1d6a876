// Rows of x in groups of one expert each: in the form that products with weights of a format take, and the panels that
// they meet.
//
// A form is made of a job whose weight and bias are those of no expert yet, for `job.to.m` rows by place. `take` puts a
// row of x there, once, and `copy` puts it to further places. `compute` multiplies places by one expert's panel, with
// the same function as a dense layer: bits are alike.
#pragma once

#include <vector>

#include "integer.h"
#include "pairs.h"
#include "workspace.h"

namespace sluice {

constexpr int64_t EXPERT_RUNS_A_THREAD = 16;  // of neighbouring panels: more than RUNS_A_THREAD, as they are unequal

// Places [begin, end), which are one expert's.
struct Group {
  int64_t expert, begin, end;
  int64_t first;  // of its pieces among those of all groups

  int64_t pieces() const { return (end - begin + ROWS_A_PIECE - 1) / ROWS_A_PIECE; }
};

// Calls work(expert, panel, begin, end) for every panel of each group's expert and for its places, ROWS_A_PIECE of them
// at most.
template <typename Work>
inline void each_piece(const std::vector<Group>& groups, const Output& to, int64_t k, const Work& work) {
  const int64_t panels = num_panels(to.n, is_gate(to.finish)), pieces = groups.back().first + groups.back().pieces();
  const bool is_few = pieces == static_cast<int64_t>(groups.size());
  const int64_t units = pieces * panels, most = EXPERT_RUNS_A_THREAD * Pool::instance().threads();
  const int64_t runs = is_few ? std::min(units, most) : units;
  const auto run = [&](int64_t at) {
    const int64_t begin = units * at / runs, end = units * (at + 1) / runs;
    const auto is_before = [](int64_t piece, const Group& one) { return piece < one.first; };
    auto group = std::upper_bound(groups.begin(), groups.end(), begin / panels, is_before) - 1;
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit == (group->first + group->pieces()) * panels) ++group;
      const int64_t own = unit - group->first * panels, piece = own % group->pieces();  // a panel's pieces together
      const int64_t first = group->begin + piece * ROWS_A_PIECE;
      work(group->expert, own / group->pieces(), first, std::min(group->end, first + ROWS_A_PIECE));
    }
  };
  if (to.m * k * panels * PANEL <= SMALL) {
    for (int64_t at = 0; at < runs; ++at) run(at);
  } else {
    Pool::instance().run(static_cast<int>(runs), run);
  }
}

// Rows for weights of float32, or of bfloat16 that are widened.
template <typename Weight>
class FloatRows {
 public:
  using Job = Linear<Weight>;
  static constexpr bool CHANGES_ALL = false;  // rows in order serve as they are

  FloatRows(const Job& job, bool in_order) : x_(const_cast<float*>(job.x)), stride_(job.x_stride) {
    static thread_local Workspace<float> rows, norms;
    if (in_order) return;
    stride_ = row_stride(job.k);
    x_ = rows.fit(job.to.m * stride_), scales_ = norms.fit(job.to.m);
  }

  void take(const Job& job, int64_t row, int64_t place) const {
    const float* from = job.x + row * job.x_stride;
    float* to = x_ + place * stride_;
    if (job.norm == nullptr) std::copy_n(from, job.k, to);
    else
      for (int64_t i = 0; i < job.k; ++i) to[i] = from[i] * job.norm[i];
    scales_[place] = norm_scale(from, job.k, job.norm_eps);
  }

  void copy(int64_t from, int64_t to) const {
    std::copy_n(x_ + from * stride_, stride_, x_ + to * stride_);
    scales_[to] = scales_[from];
  }

  void compute(Job job, int64_t panel, int64_t begin, int64_t end) const {
    job.x = x_, job.x_stride = stride_;
    compute_piece(job, panel, begin, end, scales_);
  }

 private:
  float* x_;
  int64_t stride_;
  float* scales_ = nullptr;  // or none: rows are not normed
};

#if defined(__AVX512BF16__)

// Rows for weights of bfloat16 that meet rows of bfloat16.
template <>
class FloatRows<uint16_t> {
 public:
  using Job = Linear<uint16_t>;
  static constexpr bool CHANGES_ALL = true;

  FloatRows(const Job& job, bool) : stride_(pairs_stride(job.k)) {
    static thread_local Workspace<uint32_t> words;
    static thread_local Workspace<float> norms;
    x_ = words.fit(job.to.m * stride_);
    if (job.norm_eps >= 0.0f) scales_ = norms.fit(job.to.m);
  }

  void take(Job job, int64_t row, int64_t place) const {
    if (scales_ != nullptr) scales_[place] = norm_scale(job.x + row * job.x_stride, job.k, job.norm_eps);
    round_row(job, row, reinterpret_cast<uint16_t*>(x_ + place * stride_));
  }

  void copy(int64_t from, int64_t to) const {
    std::copy_n(x_ + from * stride_, stride_, x_ + to * stride_);
    if (scales_ != nullptr) scales_[to] = scales_[from];
  }

  void compute(const Job& job, int64_t panel, int64_t begin, int64_t end) const {
    compute_piece(job, x_, panel, begin, end, scales_);
  }

 private:
  uint32_t* x_;
  int64_t stride_;
  float* scales_ = nullptr;
};

#endif

// Rows of integers.
template <int BITS, bool MINIMA>
class IntegerRows {
 public:
  using Job = Integer<BITS, MINIMA>;
  static constexpr bool CHANGES_ALL = true;

  IntegerRows(const Job& job, bool) : x_(activations_for(job)) {}

  void take(Job job, int64_t row, int64_t place) const {
    job.x += row * job.x_stride;
    quantise_row(job, 0, x_.from(place, 0));
  }

  void copy(int64_t from, int64_t to) const {
    const Activations<BITS> given = x_.from(from, 0), other = x_.from(to, 0);
    std::copy_n(given.quads, x_.groups * GROUP_QUADS, other.quads);
    std::copy_n(given.scales, x_.groups, other.scales);
    if (MINIMA) std::copy_n(given.totals, x_.groups, other.totals);
    else std::copy_n(given.starts, x_.groups, other.starts);
    other.norms[0] = given.norms[0];
  }

  void compute(const Job& job, int64_t panel, int64_t begin, int64_t end) const {
    compute_piece(job, x_, panel, begin, end);
  }

 private:
  Activations<BITS> x_;
};

}  // namespace sluice
