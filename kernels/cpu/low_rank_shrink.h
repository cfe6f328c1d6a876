// The first half of low-rank products, A · x: rows of x are gathered, normed and rounded as the linear's are.
//
// Each number is the sum of LANES sums over ascending inputs. Layout of A: [rank][inputs].
#pragma once

#include "low_rank_numbers.h"

namespace sluice {

constexpr int SHRINK_ROWS = 4;  // that meet a row of A at once

inline int64_t whole(int64_t num, int64_t of) { return (num + of - 1) / of * of; }

// The input of a linear, and what becomes of it before it is multiplied.
struct Beneath {
  Rows x;
  int64_t inputs;
  float eps;          // negative: none; else rows of x are divided by their root mean square
  const float* norm;  // [inputs] or null: and multiplied by this
  bool rounds;        // matrices of bfloat16 meet numbers rounded to it
};

// The rows of one adapter among those gathered, [first, last).
struct SideRows {
  const Side* side;
  int64_t first, last;
};

// So much of A · x as one thread computes: rows [first, last), SHRINK_ROWS at most, by ranks [begin, end) of all parts.
struct Slice {
  const SideRows* group;
  int64_t first, last, begin, end;
};

// Calls work(part, column) for each part of a side: in a row of A · x its numbers begin at `column`.
template <typename Work>
inline int64_t each_part(const Side& side, const Work& work) {
  int64_t column = 0;
  for (int64_t part = 0; part < side.num; ++part) {
    work(side.parts[part], column);
    column += whole(side.parts[part].rank, LANES);
  }
  return column;
}

// Rows of x as products take them: SHRINK_ROWS of them, with zeros up to whole vectors; in float32, rounded or both.
struct Gathered {
  int64_t width;
  float* floats;
  uint16_t* rounded;

  template <typename Number>
  const Number* row(int64_t at) const {
    if constexpr (sizeof(Number) == sizeof(float)) return floats + at * width;
    else return rounded + at * width;
  }
};

// Room for rows beside a side: null for what none of its matrices meets, float32 or rounded.
inline Gathered gathered(const Beneath& at, const Side& side) {
  static thread_local Workspace<float> floats;
  static thread_local Workspace<uint16_t> rounded;
  const int64_t width = whole(at.inputs, 2 * LANES), size = SHRINK_ROWS * width;
  bool widens = !at.rounds;
  each_part(side, [&](const LowRank& part, int64_t) { widens |= part.a_format != Stored::BFLOAT16; });
  return {width, widens ? floats.fit(size) : nullptr, at.rounds ? rounded.fit(size) : nullptr};
}

// The last numbers of a row, and zeros.
template <int64_t NUM, typename Element>
struct Part {
  Element at[NUM]{};
  Part(const Element* from, int64_t num) { std::memcpy(at, from, num * sizeof(Element)); }
};

// Calls put(i, numbers) for each vector of a row of x, by `scale` and the weights of so many norms.
template <int NORMS, typename Put>
inline void each_normed(const float* x, int64_t inputs, float scale, const float* const (&norms)[2], const Put& put) {
  const auto each = [&](int64_t i, const auto& numbers) {
    Vec v = numbers(x + i) * scale;
    for (int norm = 0; norm < NORMS; ++norm) v *= numbers(norms[norm] + i);
    put(i, v);
  };
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) each(i, [](const float* from) { return load(from); });
  if (i < inputs) each(i, [&](const float* from) { return load(Part<LANES, float>(from, inputs - i).at); });
}

// A row of x, normed as its linear and its side say.
inline void gather_row(const Beneath& at, const float* x, const float* side_norm, const Gathered& to, int64_t row) {
  const float scale = at.eps < 0.0f ? 1.0f : norm_scale(x, at.inputs, at.eps);
  const float* const norms[2]{at.norm == nullptr ? side_norm : at.norm, side_norm};
  const int num = (at.norm != nullptr) + (side_norm != nullptr);
  const auto each = [&](const auto& put) {
    if (num == 0) each_normed<0>(x, at.inputs, scale, norms, put);
    else if (num == 1) each_normed<1>(x, at.inputs, scale, norms, put);
    else each_normed<2>(x, at.inputs, scale, norms, put);
  };
  const int64_t first = row * to.width, last = first + to.width - 2 * LANES;  // of which vectors may be zeros
  if (to.floats != nullptr) {
    std::fill_n(to.floats + last, 2 * LANES, 0.0f);
    each([&](int64_t i, Vec v) { store(to.floats + first + i, v); });
  }
  if (to.rounded != nullptr) {
    std::fill_n(to.rounded + last, 2 * LANES, uint16_t{0});
    each([&](int64_t i, Vec v) { round_to(to.rounded + first + i, v); });
  }
}

// A · x of ROWS rows by LANES / ROWS ranks from `rank` on, scaled. Behind the last row or rank the last one is computed
// once more. SHRINK_ROWS ranks at a time meet all inputs, while as many behind them are brought into the cache.
template <typename Kind, int ROWS>
inline Vec shrink_tile(const LowRank& part, const Gathered& x, int64_t rows, int64_t inputs, int64_t rank) {
  constexpr int RANKS = LANES / ROWS, ONCE = std::min(RANKS, SHRINK_ROWS);
  using Element = typename Kind::Element;
  Vec acc[LANES];
  const typename Kind::Number* own[ROWS];
  for (int r = 0; r < ROWS; ++r) own[r] = x.row<typename Kind::Number>(std::min<int64_t>(r, rows - 1));
  for (int from = 0; from < RANKS; from += ONCE) {
    const Element* a[ONCE];
    for (int i = 0; i < ONCE; ++i)
      a[i] = static_cast<const Element*>(part.a) + std::min(rank + from + i, part.rank - 1) * inputs;
    Vec products[ROWS][ONCE];
    clear(products);
    const auto add = [&](int64_t k, const auto& weights) {
      for (int i = 0; i < ONCE; ++i) {
        const typename Kind::Weights weight = weights(a[i] + k);
        for (int r = 0; r < ROWS; ++r) products[r][i] = Kind::add(products[r][i], Kind::along(own[r] + k), weight);
      }
    };
    int64_t k = 0;
    for (; k + Kind::INPUTS <= inputs; k += Kind::INPUTS)
      add(k, [&](const Element* at) {
        __builtin_prefetch(at + ONCE * inputs);
        return Kind::weights_along(at);
      });
    if (k < inputs)
      add(k, [&](const Element* at) { return Kind::weights_along(Part<Kind::INPUTS, Element>(at, inputs - k).at); });
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < ONCE; ++i) acc[r * RANKS + from + i] = products[r][i];
  }
  return sums(acc) * static_cast<float>(part.scale);
}

// Ranks [begin, end) of a part for so many rows, to `low` [rows, stride], as numbers that its B meets.
template <typename Kind, int ROWS, typename Number>
inline void shrink_part(const LowRank& part, const Gathered& x, int64_t rows, int64_t inputs, int64_t begin,
                        int64_t end, float* low, int64_t stride) {
  constexpr int RANKS = LANES / ROWS;
  for (int64_t rank = begin; rank < end; rank += RANKS) {
    Number each[LANES];
    store(each, shrink_tile<Kind, ROWS>(part, x, rows, inputs, rank));
    for (int64_t r = 0; r < std::min<int64_t>(ROWS, rows); ++r)
      for (int64_t i = 0; i < RANKS; ++i)  // zeros behind the last, which may be one of two
        reinterpret_cast<Number*>(low + r * stride)[rank + i] = rank + i < part.rank ? each[r * RANKS + i] : Number{};
  }
}

inline void shrink_slice(const Beneath& at, const Slice& slice, const int64_t* places, float* low, int64_t stride) {
  const Gathered x = gathered(at, *slice.group->side);
  const int64_t rows = slice.last - slice.first;
  for (int64_t row = 0; row < rows; ++row)
    gather_row(at, at.x[places[slice.first + row]], slice.group->side->norm, x, row);
  each_part(*slice.group->side, [&](const LowRank& part, int64_t column) {
    const int64_t begin = std::max<int64_t>(0, slice.begin - column), end = std::min(part.rank, slice.end - column);
    float* to = low + slice.first * stride + column;
    with_kind(part.a_format, at.rounds, [&](auto a) {
      with_kind(part.b_format, at.rounds, [&](auto b) {
        using Kind = decltype(a);
        using Number = typename decltype(b)::Number;
        if (rows == 1) shrink_part<Kind, 1, Number>(part, x, rows, at.inputs, begin, end, to, stride);
        else shrink_part<Kind, SHRINK_ROWS, Number>(part, x, rows, at.inputs, begin, end, to, stride);
      });
    });
  });
}

}  // namespace sluice
