// The type that automaton.cpp adds to the module.
#pragma once

#include "call.h"

namespace sluice {

// Returns a new reference to the type SuffixAutomaton, or nullptr with an exception set.
PyObject* automaton_type();

}  // namespace sluice
