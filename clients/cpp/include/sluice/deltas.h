// Support for range-for over a source that has `next`.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>

#include "sluice/v1/types.pb.h"

namespace sluice {

// Makes `Source`, which has `const v1::Delta* next()`, a range that is read once.
template <typename Source>
class Deltas {
 public:
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = v1::Delta;
    using difference_type = std::ptrdiff_t;
    using pointer = const v1::Delta*;
    using reference = const v1::Delta&;

    iterator() = default;
    explicit iterator(Source* source) : source_(source), current_(source->next()) {}
    reference operator*() const { return *current_; }
    pointer operator->() const { return current_; }
    iterator& operator++() {
      current_ = source_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(const iterator& other) const { return current_ == other.current_; }
    bool operator!=(const iterator& other) const { return current_ != other.current_; }

   private:
    Source* source_ = nullptr;
    pointer current_ = nullptr;
  };

  iterator begin() { return iterator(static_cast<Source*>(this)); }
  iterator end() { return {}; }

  // Reads to the end and returns the rest of the first output's text.
  std::string text() {
    std::string all;
    for (const v1::Delta& delta : *this) {
      if (delta.output_index() == 0) all += delta.text();
    }
    return all;
  }
};

}  // namespace sluice
