// Includes all headers of the C++ client of sluice. The stubs of the contract are in sluice/v1.
#pragma once

#include "sluice/client.h"
#include "sluice/error.h"
#include "sluice/options.h"
#include "sluice/request.h"
#include "sluice/session.h"
#include "sluice/stream.h"
