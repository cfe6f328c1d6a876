// The methods that encoder.cpp adds to the module, so that encoders share the module's thread pool.
#pragma once

#include "call.h"

namespace sluice {

PyMethodDef* encoder_methods();

}  // namespace sluice
