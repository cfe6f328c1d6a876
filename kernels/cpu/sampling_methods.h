// What sampling.cpp adds to the module, which thereby has one pool of threads.
#pragma once

#include "call.h"

namespace sluice {

PyMethodDef* sampling_methods();

}  // namespace sluice
