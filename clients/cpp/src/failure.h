// Makes failures of gRPC statuses and of the server's messages, and throws them.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <string>

#include "sluice/error.h"
#include "sluice/v1/inference.pb.h"

namespace sluice {

Failure failure_of(const grpc::Status& status, const grpc::ClientContext& context);
Failure failure_of(const v1::Failed& failed);
Failure failure_of(grpc::StatusCode code, std::string message);

// Throws the failure as the exception class of its code.
[[noreturn]] void raise(Failure failure);

}  // namespace sluice
