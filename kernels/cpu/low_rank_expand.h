// The second half of low-rank products, B · (A · x): outputs that a panel has, for rows of one adapter.
//
// Each number is one chain over ascending ranks. Layout of B: [OUTPUTS outputs' block][rank][output], the last block as
// narrow as what is left.
#pragma once

#include "low_rank_numbers.h"

namespace sluice {

constexpr int64_t OUTPUTS = 64;  // of a block of B; as in kernels/formats/side_products.py
#if defined(__AVX512F__)
constexpr int EXPAND_ROWS = 4;  // that meet a panel of B at once
#else
constexpr int EXPAND_ROWS = 2;
#endif

// Numbers A · x of so many rows, and where their products go; strides are of floats. Behind each GATES products `gap`
// floats are left as they are, for those of the other half.
struct LowRows {
  int64_t num;
  const float* low;
  int64_t stride;
  float* to;
  int64_t width, gap;
};

// The first `num` numbers of rows of B.
template <typename Kind>
inline typename Kind::Weights across_part(const typename Kind::Element* const (&b)[Kind::RANKS], int64_t num) {
  using Element = typename Kind::Element;
  Element parts[Kind::RANKS][LANES]{};
  const Element* from[Kind::RANKS];
  for (int i = 0; i < Kind::RANKS; ++i) {
    std::memcpy(parts[i], b[i], num * sizeof(Element));
    from[i] = parts[i];
  }
  return Kind::across(from);
}

// Writes ROWS rows' products of V vectors of outputs within a block of B, or of `num` outputs if they are fewer than
// one vector has. Meanwhile what lies AHEAD is brought into the cache: a block of rank 16 is less than can be on its
// way from memory at once.
template <typename Kind, int ROWS, int V>
inline void expand_tile(const typename Kind::Element* b, int64_t width, int64_t rank, int64_t num,
                        const LowRows& rows) {
  using Element = typename Kind::Element;
  using Number = typename Kind::Number;
  static constexpr Element ZEROS[V * LANES]{};
  Vec acc[ROWS][V];
  clear(acc);
  for (int64_t at = 0; at < rank; at += Kind::RANKS) {
    typename Kind::Weights weights[V];
    for (int v = 0; v < V; ++v) {
      const Element* from[Kind::RANKS];
      for (int i = 0; i < Kind::RANKS; ++i) {
        from[i] = (at + i < rank ? b + (at + i) * width : ZEROS) + v * LANES;
        if (v * LANES * sizeof(Element) % LINE == 0) fetch_ahead(b + (at + i) * width + v * LANES);
      }
      weights[v] = V == 1 && num < LANES ? across_part<Kind>(from, num) : Kind::across(from);
    }
    for (int r = 0; r < ROWS; ++r) {
      const auto low = Kind::spread(reinterpret_cast<const Number*>(rows.low + r * rows.stride) + at);
      for (int v = 0; v < V; ++v) acc[r][v] = Kind::add(acc[r][v], low, weights[v]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float* to = rows.to + r * rows.width;
    if (V == 1 && num < LANES) std::memcpy(to, acc[r], num * sizeof(float));
    else
      for (int v = 0; v < V; ++v) store(to + v * LANES + v * LANES / GATES * rows.gap, acc[r][v]);
  }
}

template <typename Kind, int V, int ROWS = EXPAND_ROWS>
inline void expand_rows(const typename Kind::Element* b, int64_t width, int64_t rank, int64_t num, LowRows rows) {
  for (; rows.num >= ROWS; rows.num -= ROWS, rows.low += ROWS * rows.stride, rows.to += ROWS * rows.width)
    expand_tile<Kind, ROWS, V>(b, width, rank, num, rows);
  if constexpr (ROWS > 1) expand_rows<Kind, V, ROWS - 1>(b, width, rank, num, rows);
}

// Calls work(first number in B, width of its block, output, number of outputs) for outputs [first, end) of a part, a
// block at a time.
template <typename Work>
inline void each_block(const LowRank& part, int64_t first, int64_t end, const Work& work) {
  while (first < end) {
    const int64_t block = first / OUTPUTS * OUTPUTS, width = std::min(OUTPUTS, part.outputs - block);
    const int64_t num = std::min(end, block + width) - first;
    work(block * part.rank + first - block, width, first, num);
    first += num;
  }
}

// Writes products of outputs [first, end) of a part, in their order. With a gap, they begin where GATES of them do.
template <typename Kind>
inline void expand_outputs(const LowRank& part, int64_t first, int64_t end, const LowRows& rows) {
  each_block(part, first, end, [&](int64_t at, int64_t width, int64_t output, int64_t num) {
    const auto* b = static_cast<const typename Kind::Element*>(part.b) + at;
    LowRows own = rows;
    own.to += output - first + (output - first) / GATES * rows.gap;
    while (num > 0) {
      const int64_t done = num >= PANEL ? PANEL : num >= GATES ? GATES : std::min<int64_t>(LANES, num);
      if (done == PANEL) expand_rows<Kind, VECS>(b, width, part.rank, done, own);
      else if (done == GATES) expand_rows<Kind, VECS / 2>(b, width, part.rank, done, own);
      else expand_rows<Kind, 1>(b, width, part.rank, done, own);
      b += done, own.to += done + done / GATES * rows.gap, num -= done;
    }
  });
}

}  // namespace sluice
