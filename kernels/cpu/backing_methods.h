// The methods that backing.cpp adds to the module.
#pragma once

#include "call.h"

namespace sluice {

PyMethodDef* backing_methods();

}  // namespace sluice
