// Rows of a step in bundles, whose queries share tiles and so the reading of keys: each row by itself, or several rows
// of one token each whose contexts begin with the same keys (cascade attention, Ye et al. 2024).
//
// A query meets the same blocks of keys in the same order in any bundle, so its result is the same to the bit.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "queries.h"

namespace sluice {

constexpr int64_t DEEP = MOST_TILES;  // most tiles of one key head that a piece has
constexpr int64_t HELD = 4096;        // most numbers of a piece's running sums: the L1 cache holds them
constexpr int64_t TO_SHARE = 2;       // pieces a thread, at least, where a piece has several key heads

struct Bundle {
  const int64_t* rows;
  int64_t num;
  int64_t shared;  // how many keys all of the rows have in common, a multiple of KEYS_OF<Element>; 0 for one row
  int64_t span;    // key heads of a piece
  int64_t tiles;   // of a key head
  int64_t depth;   // most tiles of a key head that a piece has; 1 if it has several key heads
};

// Returns how many parts of up to `span` of them there are.
inline int64_t parts_of(int64_t num, int64_t span) { return (num + span - 1) / span; }

// The bundles of a step and their pieces, each of some tiles of queries or of one tile for some key heads. Late pieces
// are the longest: those of shared prefixes, and of late rows, which have the most queries.
class Bundles {
 public:
  template <typename Element>
  explicit Bundles(const Attention<Element>& job) : rows_(job.rows), kv_heads_(job.kv_heads) {
    const int64_t group = job.heads / job.kv_heads, fitting = QUERIES / group;
    const SharedPrefixes none{}, &prefixes = job.window == 0 && fitting > 1 ? job.prefixes : none;
    std::vector<bool> is_grouped(job.rows);
    const int64_t grouped = prefixes.num == 0 ? 0 : prefixes.ends[prefixes.num - 1];
    for (int64_t i = 0; i < grouped; ++i) is_grouped[prefixes.rows[i]] = true;
    bundles_.reserve(job.rows), ends_.reserve(job.rows);
    const int64_t span = span_of(job, group);
    int64_t next = 0;
    for (int64_t row = 0; row < job.rows; ++row) {
      if (is_grouped[row]) continue;
      rows_[next] = row;
      const int64_t tiles = (job.counts[row] * group + QUERIES - 1) / QUERIES;
      const bool is_one = job.counts[row] == 1;
      add({&rows_[next++], 1, 0, is_one ? span : 1, tiles, is_one ? 1 : depth_of(job, row, tiles)});
    }
    for (int64_t i = 0; i < prefixes.num; ++i) {
      const int64_t begin = i == 0 ? 0 : prefixes.ends[i - 1], size = prefixes.ends[i] - begin;
      add_group(prefixes.rows + begin, size, prefixes.lengths[i] / KEYS_OF<Element> * KEYS_OF<Element>, fitting);
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
  // Key heads of a piece for rows of one token: many, so that memory is read in order, while every thread has pieces.
  template <typename Element>
  static int64_t span_of(const Attention<Element>& job, int64_t group) {
#if defined(__AMX_BF16__)
    if (std::is_same_v<Element, uint16_t>) return 1;  // tiles hold the queries of one head
#endif
    const int64_t busy = job.rows * job.kv_heads / (TO_SHARE * Pool::instance().threads());
    const int64_t most = std::min<int64_t>({MOST_TILES, job.kv_heads, HELD / (group * job.dim), busy});
    const int64_t span = std::max<int64_t>(1, most);
    return parts_of(job.kv_heads, parts_of(job.kv_heads, span));  // parts of even size
  }

  // Tiles of a piece for rows of several tokens: some, which share the preparing of keys, while every thread has
  // pieces.
  template <typename Element>
  static int64_t depth_of(const Attention<Element>& job, int64_t row, int64_t tiles) {
#if defined(__AMX_BF16__)
    if (std::is_same_v<Element, uint16_t>) return 1;  // tiles of the processor hold the queries of one
#endif
    if (job.paths != nullptr && job.path_begins[row] >= 0) return 1;
    const int64_t busy = tiles * job.kv_heads / (TO_SHARE * Pool::instance().threads());
    const int64_t most = std::clamp<int64_t>(busy, 1, DEEP);
    return parts_of(tiles, parts_of(tiles, most));  // parts of even size
  }

  void add(Bundle bundle) {
    const int64_t before = pieces();
    bundles_.push_back(bundle);
    ends_.push_back(before + parts_of(bundle.tiles, bundle.depth) * parts_of(kv_heads_, bundle.span));
  }

  // Bundles of even size: as large as a tile allows while every thread has pieces.
  void add_group(const int64_t* rows, int64_t size, int64_t shared, int64_t fitting) {
    const int64_t busy = size * kv_heads_ / (2 * Pool::instance().threads());
    const int64_t most = std::clamp<int64_t>(busy, 1, fitting), num = (size + most - 1) / most;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t begin = size * i / num, own = size * (i + 1) / num - begin;
      add({rows + begin, own, own > 1 ? shared : 0, 1, 1, 1});
    }
  }

  std::vector<int64_t> rows_;  // those that are bundles of their own
  int64_t kv_heads_;
  std::vector<Bundle> bundles_;
  std::vector<int64_t> ends_;  // of each bundle's pieces
};

}  // namespace sluice
