// Rows of a step in bundles, whose queries share tiles and so the reading of keys: each row by itself, or several rows
// of one token each whose contexts begin with the same keys (cascade attention, Ye et al. 2024).
//
// A query meets the same blocks of keys in the same order in any bundle, so its result is the same to the bit.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "queries.h"

namespace sluice {

struct Bundle {
  const int64_t* rows;
  int64_t num;
  int64_t shared;  // how many keys all of the rows have in common, a multiple of KEYS; 0 for one row
};

// The bundles of a step and their pieces, one for each tile of queries and key head. Late pieces are the longest: those
// of shared prefixes, and of late rows, which have the most queries.
class Bundles {
 public:
  template <typename Element>
  explicit Bundles(const Attention<Element>& job) : rows_(job.rows), pieces_of_row_(job.kv_heads) {
    const int64_t group = job.heads / job.kv_heads, fitting = QUERIES / group;
    const SharedPrefixes none{}, &prefixes = job.window == 0 && fitting > 1 ? job.prefixes : none;
    std::vector<bool> is_grouped(job.rows);
    const int64_t grouped = prefixes.num == 0 ? 0 : prefixes.ends[prefixes.num - 1];
    for (int64_t i = 0; i < grouped; ++i) is_grouped[prefixes.rows[i]] = true;
    bundles_.reserve(job.rows), ends_.reserve(job.rows);
    int64_t next = 0;
    for (int64_t row = 0; row < job.rows; ++row) {
      if (is_grouped[row]) continue;
      rows_[next] = row;
      add({&rows_[next++], 1, 0}, (job.counts[row] * group + QUERIES - 1) / QUERIES);
    }
    for (int64_t i = 0; i < prefixes.num; ++i) {
      const int64_t begin = i == 0 ? 0 : prefixes.ends[i - 1], size = prefixes.ends[i] - begin;
      add_group(prefixes.rows + begin, size, prefixes.lengths[i] / KEYS * KEYS, fitting);
    }
  }

  Bundles(const Bundles&) = delete;  // bundles point into it
  Bundles& operator=(const Bundles&) = delete;

  int64_t pieces() const { return ends_.empty() ? 0 : ends_.back(); }

  // The bundle of a piece, and which of the bundle's pieces it is.
  std::pair<const Bundle&, int64_t> find(int64_t piece) const {
    const int64_t at = std::upper_bound(ends_.begin(), ends_.end(), piece) - ends_.begin();
    return {bundles_[at], piece - (at == 0 ? 0 : ends_[at - 1])};
  }

 private:
  void add(Bundle bundle, int64_t tiles) {
    const int64_t before = pieces();
    bundles_.push_back(bundle);
    ends_.push_back(before + tiles * pieces_of_row_);
  }

  // Bundles of even size: as large as a tile allows while every thread has pieces.
  void add_group(const int64_t* rows, int64_t size, int64_t shared, int64_t fitting) {
    const int64_t busy = size * pieces_of_row_ / (2 * Pool::instance().threads());
    const int64_t most = std::clamp<int64_t>(busy, 1, fitting), num = (size + most - 1) / most;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t begin = size * i / num, own = size * (i + 1) / num - begin;
      add({rows + begin, own, own > 1 ? shared : 0}, 1);
    }
  }

  std::vector<int64_t> rows_;  // those that are bundles of their own
  int64_t pieces_of_row_;      // of one tile: one for each key head
  std::vector<Bundle> bundles_;
  std::vector<int64_t> ends_;  // of each bundle's pieces
};

}  // namespace sluice
