// Buffers for results between the operations of a step: kept from call to call, in large pages if the system has them.
//
// Buffers allocated for each layer of a prompt would come from the system, page by page, and be cleared each time.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "vector.h"

namespace sluice {

constexpr int64_t LARGE_PAGE = 2 << 20;  // bytes

// Returns the stride of rows of `width` 4-byte numbers: an odd number of cache lines, since rows at a stride of a power
// of two would share few cache sets.
inline int64_t row_stride(int64_t width) {
  constexpr int64_t each = LINE / 4;
  return ((width + each - 1) / each | 1) * each;
}

// A buffer for one thread at a time. It only grows; growing loses its contents.
template <typename Item>
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(items_); }

  Item* fit(int64_t num) {
    if (num <= num_) return items_;
    std::free(items_);
    items_ = nullptr, num_ = 0;
    const int64_t bytes = num * static_cast<int64_t>(sizeof(Item)), page = bytes < LARGE_PAGE ? LINE : LARGE_PAGE;
    const int64_t size = (bytes + page - 1) / page * page;
    void* found = std::aligned_alloc(page, size);
    if (found == nullptr) throw std::bad_alloc();
    if (page == LARGE_PAGE) madvise(found, size, MADV_HUGEPAGE);  // without large pages, small ones are used
    items_ = static_cast<Item*>(found), num_ = num;
    return items_;
  }

 private:
  Item* items_ = nullptr;
  int64_t num_ = 0;
};

}  // namespace sluice
