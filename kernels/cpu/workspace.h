// Memory between the operations of a step: kept from call to call, in large pages where the system gives them.
//
// Taken anew for each layer of a prompt it would come from the system, page by page, and be cleared each time.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "vector.h"

namespace sluice {

constexpr int64_t LARGE_PAGE = 2 << 20;  // bytes

// Floats, or what is as wide, from one row to the next: an odd number of lines, as rows at a power of two would share a
// few sets of the caches.
inline int64_t row_stride(int64_t width) {
  constexpr int64_t each = LINE / 4;
  return ((width + each - 1) / each | 1) * each;
}

// For one caller at a time. Grows only, and loses what it held when it does.
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
    if (page == LARGE_PAGE) madvise(found, size, MADV_HUGEPAGE);  // if the system has none, small ones serve
    items_ = static_cast<Item*>(found), num_ = num;
    return items_;
  }

 private:
  Item* items_ = nullptr;
  int64_t num_ = 0;
};

}  // namespace sluice
