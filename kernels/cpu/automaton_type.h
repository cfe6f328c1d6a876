// What automaton.cpp adds to the module.
#pragma once

#include "call.h"

namespace sluice {

// A new reference to the type SuffixAutomaton; nullptr with an error set.
PyObject* automaton_type();

}  // namespace sluice
