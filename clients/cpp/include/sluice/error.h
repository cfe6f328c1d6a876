// The errors of calls and generations: one class per gRPC code, filled from google.rpc's error details.
#pragma once

#include <grpcpp/support/status_code_enum.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "sluice/options.h"
#include "sluice/v1/types.pb.h"

namespace sluice {

// A field of the request whose value is not allowed.
struct Violation {
  std::string field;
  std::string description;
};

// A failure of a call or a generation, as a value.
struct Failure {
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  // What failed, the value, the limit, and what to do.
  std::string message = {};
  // The reason in ErrorInfo, such as "QUEUE_FULL"; "" if the server sent none (its transport failed).
  std::string reason = {};
  // The metadata in ErrorInfo.
  std::map<std::string, std::string> metadata = {};
  // How long to wait before another attempt; absent when the server named no time.
  std::optional<Duration> retry_after = {};
  std::vector<Violation> violations = {};
  std::string generation_id = {};
  // Sequence number of the last delta that the server sent; 0 without one.
  std::uint64_t last_seq = 0;
  // Tokens used before the failure; absent if the generation had not begun.
  std::optional<v1::Usage> usage = {};
  // Id of the server's trace; "" without one.
  std::string trace_id = {};
};

// Returns the code's name, such as "INVALID_ARGUMENT".
const char* name_of(grpc::StatusCode code);

class Error : public std::runtime_error, public Failure {
 public:
  explicit Error(Failure failure);
};

template <grpc::StatusCode>
class ErrorOf : public Error {
 public:
  using Error::Error;
};

using Cancelled = ErrorOf<grpc::StatusCode::CANCELLED>;
using InvalidArgument = ErrorOf<grpc::StatusCode::INVALID_ARGUMENT>;
using DeadlineExceeded = ErrorOf<grpc::StatusCode::DEADLINE_EXCEEDED>;
using NotFound = ErrorOf<grpc::StatusCode::NOT_FOUND>;
using AlreadyExists = ErrorOf<grpc::StatusCode::ALREADY_EXISTS>;
using PermissionDenied = ErrorOf<grpc::StatusCode::PERMISSION_DENIED>;
using Unauthenticated = ErrorOf<grpc::StatusCode::UNAUTHENTICATED>;
using ResourceExhausted = ErrorOf<grpc::StatusCode::RESOURCE_EXHAUSTED>;
using FailedPrecondition = ErrorOf<grpc::StatusCode::FAILED_PRECONDITION>;
using Aborted = ErrorOf<grpc::StatusCode::ABORTED>;
using OutOfRange = ErrorOf<grpc::StatusCode::OUT_OF_RANGE>;
using Unimplemented = ErrorOf<grpc::StatusCode::UNIMPLEMENTED>;
using InternalError = ErrorOf<grpc::StatusCode::INTERNAL>;
using Unavailable = ErrorOf<grpc::StatusCode::UNAVAILABLE>;

}  // namespace sluice
