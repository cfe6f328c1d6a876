// What the client starts a session with.
#pragma once

#include <memory>

#include "sluice/session.h"

namespace sluice {

class Pool;

// A session on these lines.
Session session_of(std::shared_ptr<Pool> pool);

}  // namespace sluice
