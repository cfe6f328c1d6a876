// The methods that sampling.cpp adds to the module, so that sampling shares the module's thread pool.
#pragma once

#include "call.h"

namespace sluice {

PyMethodDef* sampling_methods();

}  // namespace sluice
