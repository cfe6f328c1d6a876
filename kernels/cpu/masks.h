// Which of a row's columns are meant, for some of a step's rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace sluice {

// The row of each entry of a list.
struct Listed {
  const int64_t* rows;  // [num], ascending
  int64_t num;

  // Returns the range [first, last) of the entries of `row`.
  std::pair<int64_t, int64_t> of(int64_t row) const {
    const auto [first, last] = std::equal_range(rows, rows + num, row);
    return {first - rows, last - rows};
  }

  // Returns the index of the first entry of `row`, -1 if it has none.
  int64_t find(int64_t row) const {
    const auto [first, last] = of(row);
    return first < last ? first : -1;
  }
};

// Ids by row, as bits: bit b of word w stands for id 32 w + b. Rows that are not listed have all ids.
struct Masks {
  Listed at;
  const uint32_t* bits;  // [num, words]
  int64_t words;

  // Returns the bits of a row; null if it is not masked.
  const uint32_t* of(int64_t row) const {
    const int64_t i = at.find(row);
    return i < 0 ? nullptr : bits + i * words;
  }
};

}  // namespace sluice
