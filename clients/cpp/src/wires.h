// The start of a session.
#pragma once

#include <memory>

#include "sluice/session.h"

namespace sluice {

class Pool;

// Opens a session on the lines of this pool.
Session session_of(std::shared_ptr<Pool> pool);

}  // namespace sluice
