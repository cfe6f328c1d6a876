// A rank's view of the memory of sums as Python passes it; see kernels/cpu/sums.py.
#pragma once

#include "call.h"
#include "sums.h"

namespace sluice {

inline Segment segment(Arguments& arguments) {
  Segment found;
  found.first = arguments.address<char>();
  found.size = arguments.integer();
  found.slot_floats = arguments.integer();
  found.rank = arguments.integer();
  found.file = static_cast<int>(arguments.integer());
  found.timeout_s = arguments.real();
  found.number = arguments.integer();
  return found;
}

}  // namespace sluice
