// Tiles of queries of one sequence, and the addresses of their keys and values in the paged cache.
#pragma once

#include <algorithm>
#include <utility>

#include "slots.h"

namespace sluice {

constexpr int KEYS = 32;

// How many keys of a cache a query meets at a time. A block of int8 whose bytes are multiplied takes little time beside
// the maxima and sums over its keys, so it is larger.
#if defined(__AVX512VNNI__)
template <typename Element>
constexpr int KEYS_OF = sizeof(Element) == 1 ? 2 * KEYS : KEYS;
#else
template <typename Element>
constexpr int KEYS_OF = KEYS;
#endif

constexpr int MAX_DIM = 256;
constexpr int QUERIES = 16;    // query rows of a tile: they share a look-up of keys and values
constexpr int MOST_TILES = 8;  // of a piece of work
constexpr int FEW = 4;         // query rows that are reduced together, where there are no more

// Rows of one token in groups whose contexts begin with the same keys.
struct SharedPrefixes {
  const int64_t* rows;     // of the first group, of the second, …
  const int64_t* ends;     // [num] end of each group in `rows`
  const int64_t* lengths;  // [num] how many keys the rows of a group have in common
  int64_t num;
};

template <typename Element>
struct Attention {
  const float* q;  // [T, heads, dim], tokens q_stride apart
  int64_t q_stride;
  Cache<Element> cache;
  int64_t kv_heads, heads, dim;
  const int32_t* tables;  // [rows, table_width]
  int64_t table_width;
  const int64_t* firsts;    // [rows] index of the row's first token
  const int64_t* counts;    // [rows] number of the row's tokens in this step
  const int64_t* contexts;  // [rows] length of the sequence after this step's write
  int64_t rows;
  const int64_t* positions;       // [T] position of each token in its sequence
  const int64_t* ends = nullptr;  // [T] where the keys end that a token sees, behind itself in an image; or null
  const int32_t* paths;        // [counts, counts] for each row with a draft tree: by depth, the visible tokens; or null
  const int64_t* path_begins;  // [rows] offset of the row's paths, -1 without a tree; or null
  SharedPrefixes prefixes;     // used where queries see all keys
  int64_t window;              // keys visible to a query, its own included; 0: all
  float scale;
  float cap;                     // scores become cap · tanh(score / cap); 0: no cap
  const float* sinks = nullptr;  // [heads] score of an extra key without a value, visible to each query; or null
  float* out;                    // [T, heads, dim], tokens out_stride apart
  int64_t out_stride;
};

// Up to QUERIES query heads that use the same key head: of one sequence, consecutive in (token, head of the group), or
// of several sequences that begin with the same keys.
struct QueryTile {
  int count = 0;
  const int32_t* table[QUERIES];  // block table of the query's row
  const float* q[QUERIES];
  float* out[QUERIES];
  int64_t begin[QUERIES], end[QUERIES];  // visible keys
  const int32_t* path[QUERIES];          // the query's path from position `start` on (Attention.paths); or null
  float sink[QUERIES];                   // the sink of the query's head; minus infinity without one
  int64_t start;                         // the row's first position in this step: paths differ from here on only
};

// The addresses of KEYS_OF<Element> consecutive keys and values of one head.
template <typename Element>
struct KeyBlock {
  static constexpr int NUM = KEYS_OF<Element>;

  const Element* keys[NUM];
  const Element* values[NUM];
  const KeyBlock* ahead;  // the next block, to prefetch; this one if there is no next block
  int num;

  // Finds positions [from, from + NUM) of a sequence, of which [begin, end) are readable. The others repeat the
  // nearest readable position, since keys before a window may lie in blocks that were freed. With a path, the path
  // gives the positions from `start` on; they ascend too.
  void find(const Attention<Element>& job, const int32_t* table, int64_t kv_head, int64_t from, int64_t begin,
            int64_t end, const int32_t* path, int64_t start) {
    const int64_t size = job.cache.block_size;
    num = static_cast<int>(std::min<int64_t>(NUM, end - from));
    ahead = this;
    if (path == nullptr && from >= begin && from + NUM <= end) {
      for (int64_t at = from, past; at < from + NUM; at = past) {
        past = std::min(from + NUM, at / size * size + size);
        place(at - from, past - from, job.cache.key(table[at / size], at % size, kv_head), job.cache);
      }
      return;
    }
    int64_t first = 0, past = 0;  // positions [first, past) of the cache block that starts at `of`
    const Element* of = nullptr;
    for (int j = 0; j < NUM; ++j) {
      int64_t position = std::min(std::max(from + j, begin), end - 1);
      if (path != nullptr && position >= start) position = start + path[position - start];
      if (position < first || position >= past) {
        first = position / size * size, past = first + size;
        of = job.cache.key(table[position / size], 0, kv_head);
      }
      keys[j] = of + (position - first) * job.cache.token;
      values[j] = keys[j] + job.cache.half;
    }
  }

  // Takes tokens [from, past) of this block from one of the cache, where the first one's key is given.
  void place(int64_t from, int64_t past, const Element* first, const Cache<Element>& cache) {
    for (int64_t j = from; j < past; ++j, first += cache.token) keys[j] = first, values[j] = first + cache.half;
  }

  // Finds the same positions of another head, `by` elements behind that of `other`.
  void find_beside(const KeyBlock& other, int64_t by) {
    num = other.num;
    ahead = this;
    for (int j = 0; j < NUM; ++j) keys[j] = other.keys[j] + by, values[j] = other.values[j] + by;
  }
};

// The blocks of keys [begin, end) of a sequence, all heads of a block before the next block. Two are known ahead of the
// one that is computed, to be prefetched.
template <typename Element>
class BlocksAhead {
 public:
  static constexpr int NUM = KEYS_OF<Element>;

  BlocksAhead(const Attention<Element>& job, const int32_t* table, int64_t first, int heads, int64_t begin, int64_t end)
      : job_(job), table_(table), first_(first), heads_(heads), begin_(begin), end_(end), from_(begin / NUM * NUM) {
    if (begin >= end) return;
    ring_[0].find(job, table, first, from_, begin, end, nullptr, 0);
    find_next();
  }

  BlocksAhead(const BlocksAhead&) = delete;  // blocks point to each other
  BlocksAhead& operator=(const BlocksAhead&) = delete;

  // Returns the next block. It stays until the one behind it is taken.
  KeyBlock<Element>& take() {
    find_next();
    return ring_[std::exchange(taken_, behind(taken_))];
  }

 private:
  static int behind(int at) { return (at + 1) % 3; }

  void find_next() {
    KeyBlock<Element>&last = ring_[found_], &next = ring_[behind(found_)];
    if (head_ + 1 < heads_) {
      next.find_beside(last, job_.cache.head), ++head_;
    } else if (from_ + NUM < end_) {
      from_ += NUM, head_ = 0;
      next.find(job_, table_, first_, from_, begin_, end_, nullptr, 0);
    } else {
      return;
    }
    last.ahead = &next, found_ = behind(found_);
  }

  const Attention<Element>& job_;
  const int32_t* table_;
  int64_t first_;  // key head
  int heads_;
  int64_t begin_, end_, from_;  // keys; `from_`: the first of the last block found
  int head_ = 0;                // of the last block found
  int found_ = 0, taken_ = 0;   // places in the ring of the last block found, and of the next one to take
  KeyBlock<Element> ring_[3];
};

// Prefetches the cache line at from + at; does nothing unless `at` is the start of a line. With the first line of a key
// or value comes that of its scale: rows with scales are no whole number of lines, so that no row may begin in it.
// Inlined before the compiler could find that a call has no effect.
template <typename Element>
[[gnu::always_inline]] inline void fetch(const Element* from, int64_t at, int64_t dim) {
  if (at * sizeof(Element) % LINE == 0) __builtin_prefetch(from + at);
  if (IS_SCALED<Element> && at == 0) __builtin_prefetch(from + dim);
}

}  // namespace sluice
