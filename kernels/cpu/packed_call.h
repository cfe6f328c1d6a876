// A linear of any format as Python passes it; see `NativeLinear.arguments` in kernels/formats/linear.py.
#pragma once

#include "call.h"
#include "packed.h"

namespace sluice {

template <typename From>
Packed packed(From& from) {
  Packed layer;
  layer.format = static_cast<Format>(from.integer());
  layer.weight = from.template address<const void>();
  layer.bias = from.template address<const float>();
  layer.inputs = from.integer();
  layer.outputs = from.integer();
  layer.norm = from.template address<const float>();
  return layer;
}

}  // namespace sluice
