// The methods that sums.cpp adds to the module, so that sums share the module's thread pool.
#pragma once

#include "call.h"

namespace sluice {

PyMethodDef* sums_methods();

}  // namespace sluice
