// Lists of rows, and masks of rows, as calls from Python pass them.
#pragma once

#include "call.h"
#include "masks.h"

namespace sluice {

inline Listed listed(Arguments& arguments) {
  const int64_t* rows = arguments.address<const int64_t>();
  return {rows, arguments.integer()};
}

inline Masks masks(Arguments& arguments) {
  Masks found;
  found.at = listed(arguments);
  found.bits = arguments.address<const uint32_t>();
  found.words = arguments.integer();
  return found;
}

}  // namespace sluice
