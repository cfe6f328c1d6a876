// How packed weights [N, K] lie in memory and what becomes of a product: shared by the linears of every number format.
//
// A weight lies in panels of PANEL columns (outputs), so that it is read once, in order; rows of x meet one panel at a
// time. Gated: a gate and its partner share a panel.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "exponentials.h"
#include "masks.h"
#include "pool.h"
#include "vector.h"

namespace sluice {

#if defined(__AVX512F__)
constexpr int VECS = 4;  // vectors in a panel's row
constexpr int TILE = 6;  // rows of x at once: TILE * VECS accumulators, and the registers that remain for loads
#else
constexpr int VECS = 2;
constexpr int TILE = 4;
#endif
constexpr int PANEL = VECS * LANES;
constexpr int GATES = PANEL / 2;  // of a gated panel: as many columns of the gate, then as many of the other half
constexpr int ROWS_A_PIECE = 16 * TILE;
constexpr int64_t RUNS_A_THREAD = 8;  // of neighbouring panels, if rows are few: what is fetched ahead is then used

constexpr int64_t TILES_WIDENED = 2;  // above, a part of a panel is widened once rather than by every tile of rows

constexpr int64_t AHEAD = 4096;  // bytes: the processor's own prefetching stops at the end of each page

// Has the weights that come AHEAD bytes later brought into the cache; past the end it does nothing. Always inlined: GCC
// 12 drops calls of a function that does nothing else.
template <typename Weight>
__attribute__((always_inline)) inline void fetch_ahead(const Weight* weight) {
  __builtin_prefetch(reinterpret_cast<const char*>(weight) + AHEAD);
}

// What becomes of a product: with a gate f(first half) · second half, f being SiLU, or GELU by its approximation with
// tanh (Hendrycks & Gimpel 2016), or the gate of gpt-oss (OpenAI 2025), which holds both halves within a bound.
enum class Finish { STORE, ADD, SILU, GELU, CLAMPED };

inline bool is_gate(Finish finish) { return finish >= Finish::SILU; }

// Cache lines side by side.
struct Lines {
  const uint8_t* first;
  int64_t num;
};

// What is beside the products of a linear's rows.
struct Added {
  // [M] or null: of each row null, or what is added to it in the order of packed columns, once products are scaled;
  // with a gate before that and the bias, else behind all.
  const float* const* rows = nullptr;
  const Lines* later = nullptr;  // or null: read after the products, and may be fetched meanwhile
  int64_t all_later = 0;         // lines of all of them
};

// Where products go.
struct Output {
  const float* bias;  // [N] or null; with a gate [2 N], the gates' first
  float* y;           // [M, N], rows y_stride apart; with ADD it is added to
  int64_t y_stride;
  int64_t m, n;  // with a gate, n counts outputs: the packed weight has 2 n columns
  Finish finish;
  Added added = {};
  Masks wanted = {};  // columns: what is not wanted of a row may be left as it is; without a gate only
};

inline int64_t num_panels(int64_t outputs, bool gated) {
  const int64_t width = gated ? GATES : PANEL;
  return (outputs + width - 1) / width;
}

// Panels of a weight of that many rows.
inline int64_t panels_of(int64_t rows, bool gated) { return num_panels(gated ? rows / 2 : rows, gated); }

// Source row of a packed column, or -1 for padding.
inline int64_t source_row(int64_t column, int64_t rows, bool gated) {
  if (!gated) return column < rows ? column : -1;
  const int64_t half = rows / 2, gate = column / PANEL * GATES + column % GATES;
  if (gate >= half) return -1;
  return column % PANEL < GATES ? gate : half + gate;
}

// All activations are x · sigmoid of something, GELU's being this: (1 + tanh(a)) / 2 = sigmoid(2 a).
inline Vec gelu_power(Vec x) {
  return x * (x * x * (1.5957691216057308f * 0.044715f) + 1.5957691216057308f);  // 2 · sqrt(2 / pi)
}

constexpr float BOUND = 7.0f, STEEP = 1.702f;  // of gpt-oss

// NaN stays NaN.
inline Vec at_most(Vec x, float bound) { return x > bound ? broadcast(bound) : x; }

// What f(gate) · up is computed of instead of the halves, gate and up, and of what of the gate the sigmoid is.
inline Vec prepare(Finish finish, Vec& gate, Vec& up) {
  if (finish == Finish::SILU) return gate;
  if (finish == Finish::GELU) return gelu_power(gate);
  gate = at_most(gate, BOUND), up = 1.0f - at_most(-at_most(up, BOUND), BOUND);
  return gate * STEEP;
}

// One row's sums of one panel.
struct Sums {
  Vec at[VECS];
};

inline Sums load_sums(const float* from) {
  Sums sums;
  for (int v = 0; v < VECS; ++v) sums.at[v] = load(from + v * LANES);
  return sums;
}

// What is added to one row's sums of one panel, or null.
inline const float* addend(const Output& to, int64_t row, int64_t panel) {
  const float* const* rows = to.added.rows;
  return rows == nullptr || rows[row] == nullptr ? nullptr : rows[row] + panel * PANEL;
}

// Goes through the lines that are fetched while one panel's first rows are multiplied: its share of what is read later.
class Fetching {
 public:
  Fetching(const Output& to, int64_t panel, int64_t first_row) : lines_(to.added.later) {
    const int64_t panels = num_panels(to.n, is_gate(to.finish)), all = first_row == 0 ? to.added.all_later : 0;
    at_ = all * panel / panels, left_ = all * (panel + 1) / panels - at_;
    for (; left_ > 0 && at_ >= lines_->num; ++lines_) at_ -= lines_->num;
  }

  // Returns the next lines that lie side by side, so many at most; none if there are no more.
  Lines take(int64_t most) {
    if (left_ == 0) return {nullptr, 0};
    const Lines found{lines_->first + at_ * LINE, std::min({most, left_, lines_->num - at_})};
    at_ += found.num, left_ -= found.num;
    if (at_ == lines_->num) ++lines_, at_ = 0;
    return found;
  }

 private:
  const Lines* lines_;
  int64_t at_, left_;
};

inline void finish_gates(const Output& to, int64_t row, int64_t panel, const Sums& sums, float scale) {
  const int64_t first = panel * GATES, count = std::min<int64_t>(GATES, to.n - first);
  float* y = to.y + row * to.y_stride + first;
  float part[GATES];
  float* out = count == GATES ? y : part;
  const float* added = addend(to, row, panel);
  for (int v = 0; v < VECS / 2; ++v) {
    Vec gate = sums.at[v] * scale, up = sums.at[VECS / 2 + v] * scale;
    if (added != nullptr) gate += load(added + v * LANES), up += load(added + GATES + v * LANES);
    for (int j = 0; to.bias != nullptr && j < LANES && first + v * LANES + j < to.n; ++j) {
      gate[j] += to.bias[first + v * LANES + j];
      up[j] += to.bias[to.n + first + v * LANES + j];
    }
    const Vec power = prepare(to.finish, gate, up);
    store(out + v * LANES, gate / (1.0f + exp(-power)) * up);
  }
  if (count < GATES) std::memcpy(y, part, count * sizeof(float));
}

// Writes one row's sums of one panel to where they belong.
inline void finish_row(const Output& to, int64_t row, int64_t panel, const Sums& sums, float scale) {
  if (is_gate(to.finish)) return finish_gates(to, row, panel, sums, scale);
  const float* added = addend(to, row, panel);
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, to.n - first);
  float* y = to.y + row * to.y_stride + first;
  if (count == PANEL && to.bias == nullptr) {
    for (int v = 0; v < VECS; ++v) {
      Vec value = sums.at[v] * scale;
      if (to.finish == Finish::ADD) value = load(y + v * LANES) + value;
      store(y + v * LANES, added == nullptr ? value : value + load(added + v * LANES));
    }
    return;
  }
  float each[PANEL];
  for (int v = 0; v < VECS; ++v) store(each + v * LANES, sums.at[v]);
  for (int64_t i = 0; i < count; ++i) {
    float value = each[i] * scale + (to.bias == nullptr ? 0.0f : to.bias[first + i]);
    if (to.finish == Finish::ADD) value = y[i] + value;
    y[i] = added == nullptr ? value : value + added[i];
  }
}

// Has the lines brought into the cache, to be written, that one row's sums of one panel go to: rows lie pages apart,
// and what is written there waits for memory line by line (512 rows of int8, 1024 by 4096: 10.8 ms; 6.3 so).
inline void fetch_results(const Output& to, int64_t row, int64_t panel) {
  const int64_t width = is_gate(to.finish) ? GATES : PANEL;
  const float* y = to.y + row * to.y_stride + panel * width;
  for (int64_t i = 0; i < width; i += LANES) __builtin_prefetch(y + i, 1);
}

inline void fetch_results(const Output& to, int64_t begin, int64_t end, int64_t panel) {
  for (int64_t row = begin; row < end; ++row) fetch_results(to, row, panel);
}

// Has what is added to one row's sums of one panel brought into the second-level cache: it was written before the
// linear's products, which read all of its weights since.
inline void fetch_added(const Output& to, int64_t row, int64_t panel) {
  if (const float* added = addend(to, row, panel))
    for (int v = 0; v < VECS; ++v) __builtin_prefetch(added + v * LANES, 0, 2);
}

// Calls work(row) for each of `m` rows of `k` numbers, on several threads if that pays.
template <typename Work>
inline void each_row(int64_t m, int64_t k, const Work& work) {
  Pool& pool = Pool::instance();
  const int64_t pieces = m * k <= SMALL ? 1 : std::min<int64_t>(m, 2 * pool.threads());
  pool.run(static_cast<int>(pieces), [&](int64_t piece) {
    for (int64_t row = m * piece / pieces; row < m * (piece + 1) / pieces; ++row) work(row);
  });
}

// Which rows want some of a panel's columns.
class WantedRows {
 public:
  explicit WantedRows(const Output& to) : bits_(to.wanted.at.num > 0 ? to.m : 0), words_(to.wanted.words) {
    for (int64_t i = 0; i < to.wanted.at.num; ++i) bits_[to.wanted.at.rows[i]] = to.wanted.bits + i * words_;
  }

  // Returns the first rows side by side, of those in [begin, end), that want some of a panel; an empty range if none
  // do.
  std::pair<int64_t, int64_t> first(int64_t panel, int64_t begin, int64_t end) const {
    if (bits_.empty()) return {begin, end};
    while (begin < end && !want(bits_[begin], panel)) ++begin;
    int64_t last = begin;
    while (last < end && want(bits_[last], panel)) ++last;
    return {begin, last};
  }

 private:
  static constexpr int64_t WORD = 32;  // columns

  bool want(const uint32_t* bits, int64_t panel) const {
    if (bits == nullptr) return true;
    const int64_t word = panel * PANEL / WORD;
    if constexpr (PANEL < WORD) return (bits[word] >> (panel * PANEL % WORD) & ((1u << PANEL) - 1)) != 0;
    return std::any_of(bits + word, bits + std::min(words_, word + PANEL / WORD),
                       [](uint32_t one) { return one != 0; });
  }

  std::vector<const uint32_t*> bits_;  // by row, null for one that wants all; empty if all do
  int64_t words_;
};

// Calls work(panel, begin, end) for every panel of `to` and for rows [begin, end), ROWS_A_PIECE of them at most: those
// that want some of it.
template <typename Work>
inline void each_piece(const Output& to, int64_t k, const Work& work) {
  const int64_t panels = num_panels(to.n, is_gate(to.finish));
  const int64_t groups = (to.m + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
  const int64_t runs = groups > 1 ? panels : std::min(panels, RUNS_A_THREAD * Pool::instance().threads());
  const WantedRows wanted(to);
  const auto piece = [&](int64_t at) {
    const int64_t group = at % groups, run = at / groups, end = std::min(to.m, (group + 1) * ROWS_A_PIECE);
    for (int64_t panel = panels * run / runs; panel < panels * (run + 1) / runs; ++panel) {
      auto [first, last] = wanted.first(panel, group * ROWS_A_PIECE, end);
      for (; first < last; std::tie(first, last) = wanted.first(panel, last, end)) work(panel, first, last);
    }
  };
  if (to.m * k * panels * PANEL <= SMALL) {
    for (int64_t at = 0; at < runs * groups; ++at) piece(at);
  } else {
    Pool::instance().run(static_cast<int>(runs * groups), piece);
  }
}

}  // namespace sluice
