// What attention prefetches of the keys and values of a block while it computes with others.
#pragma once

#include "queries.h"

namespace sluice {

// The keys or values to prefetch: `next` to the first-level cache; `later`, unless it is null, to the second-level one,
// which can ask memory for more lines at once.
template <typename Element>
struct Ahead {
  const Element* const* next;
  const Element* const* later;

  // Prefetches the cache line at number `at` of row j; does nothing unless `at` is the start of a line.
  [[gnu::always_inline]] void fetch(int j, int64_t at, int64_t dim) const {
    sluice::fetch(next[j], at, dim);
    if (later != nullptr && at * sizeof(Element) % LINE == 0) __builtin_prefetch(later[j] + at, 0, 2);
  }
};

// What to prefetch during the scores of a block, and during its values.
//
// Values come to the first-level cache during the scores of their own block, and keys during the values of the block
// before. Short rows come too late by that, and both come during those of the block before. The cache would not hold
// two blocks of longer rows: they come to the second-level cache that early.
template <typename Element>
class Lookahead {
 public:
  // is_many: whether the block meets so many queries that they compute for longer than memory takes; is_quick: whether
  // queries take so little time that short rows come to the second-level cache first, too.
  Lookahead(int64_t dim, bool is_many, bool is_quick) : is_near_(is_many || dim * sizeof(Element) > 2 * LINE) {
    is_early_ = !IS_SCALED<Element> && !is_many && (is_near_ || is_quick);
  }

  Ahead<Element> before_values(const KeyBlock<Element>& block) const {
    return {is_near_ ? block.values : block.ahead->keys, is_early_ ? later(block).keys : nullptr};
  }

  Ahead<Element> after_values(const KeyBlock<Element>& block) const {
    return {is_near_ ? block.ahead->keys : block.ahead->values, is_early_ ? later(block).values : nullptr};
  }

 private:
  const KeyBlock<Element>& later(const KeyBlock<Element>& block) const {
    return is_near_ ? *block.ahead : *block.ahead->ahead;
  }

  bool is_near_, is_early_;
};

}  // namespace sluice
