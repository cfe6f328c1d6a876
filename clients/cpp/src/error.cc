#include "sluice/error.h"

#include "failure.h"
#include "sluice_client/details.pb.h"

namespace sluice {
namespace {

constexpr const char* kNames[] = {
    "OK",        "CANCELLED",       "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS",  "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",    "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
};
constexpr int kNumCodes = sizeof(kNames) / sizeof(*kNames);

grpc::StatusCode code_of(int number) {
  return number > 0 && number < kNumCodes ? static_cast<grpc::StatusCode>(number) : grpc::StatusCode::UNKNOWN;
}

std::string described(const Failure& failure) {
  const std::string reason = failure.reason.empty() ? "" : " (" + failure.reason + ")";
  return name_of(failure.code) + reason + ": " + failure.message;
}

// Unpacks detail `packed` into `message` if it has the google.rpc or sluice type `name`.
template <typename Message>
bool unpacked(const google::protobuf::Any& packed, const char* name, Message& message) {
  const std::string& url = packed.type_url();
  return url.substr(url.rfind('/') + 1) == name && message.ParseFromString(packed.value());
}

void take(Failure& failure, const google::protobuf::Any& packed) {
  sluice_client::ErrorInfo info;
  sluice_client::RetryInfo retry;
  sluice_client::BadRequest bad;
  v1::Usage usage;
  if (unpacked(packed, "google.rpc.ErrorInfo", info)) {
    failure.reason = info.reason();
    failure.metadata = {info.metadata().begin(), info.metadata().end()};
    failure.generation_id = failure.metadata["generation_id"];
    failure.last_seq = std::strtoull(failure.metadata["last_seq"].c_str(), nullptr, 10);
  } else if (unpacked(packed, "google.rpc.RetryInfo", retry)) {
    const auto& delay = retry.retry_delay();
    failure.retry_after = std::chrono::seconds(delay.seconds()) + Duration(delay.nanos());
  } else if (unpacked(packed, "google.rpc.BadRequest", bad)) {
    for (const auto& one : bad.field_violations()) failure.violations.push_back({one.field(), one.description()});
  } else if (unpacked(packed, "sluice.v1.Usage", usage)) {
    failure.usage = usage;
  }
}

std::string value_of(const grpc::ClientContext& context, const char* key) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(key);
  return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
}

}  // namespace

const char* name_of(grpc::StatusCode code) { return kNames[code >= 0 && code < kNumCodes ? code : 2]; }

Error::Error(Failure failure) : std::runtime_error(described(failure)), Failure(std::move(failure)) {}

Failure failure_of(const grpc::Status& status, const grpc::ClientContext& context) {
  Failure failure;
  failure.code = status.error_code();
  failure.message = status.error_message();
  v1::Failed packed;  // has the fields of google.rpc.Status under the same numbers
  if (packed.ParseFromString(status.error_details())) {
    for (const auto& detail : packed.details()) take(failure, detail);
  }
  failure.trace_id = value_of(context, "x-sluice-trace-id");
  if (failure.generation_id.empty()) failure.generation_id = value_of(context, "x-sluice-generation-id");
  return failure;
}

Failure failure_of(const v1::Failed& failed) {
  Failure failure;
  failure.code = code_of(failed.code());
  failure.message = failed.message();
  for (const auto& detail : failed.details()) take(failure, detail);
  failure.generation_id = failed.generation_id();
  failure.last_seq = failed.last_seq();
  if (failed.has_usage()) failure.usage = failed.usage();
  return failure;
}

Failure failure_of(grpc::StatusCode code, std::string message) {
  Failure failure;
  failure.code = code;
  failure.message = std::move(message);
  return failure;
}

void raise(Failure failure) {
  switch (failure.code) {
    case grpc::StatusCode::CANCELLED: throw Cancelled(std::move(failure));
    case grpc::StatusCode::INVALID_ARGUMENT: throw InvalidArgument(std::move(failure));
    case grpc::StatusCode::DEADLINE_EXCEEDED: throw DeadlineExceeded(std::move(failure));
    case grpc::StatusCode::NOT_FOUND: throw NotFound(std::move(failure));
    case grpc::StatusCode::ALREADY_EXISTS: throw AlreadyExists(std::move(failure));
    case grpc::StatusCode::PERMISSION_DENIED: throw PermissionDenied(std::move(failure));
    case grpc::StatusCode::UNAUTHENTICATED: throw Unauthenticated(std::move(failure));
    case grpc::StatusCode::RESOURCE_EXHAUSTED: throw ResourceExhausted(std::move(failure));
    case grpc::StatusCode::FAILED_PRECONDITION: throw FailedPrecondition(std::move(failure));
    case grpc::StatusCode::ABORTED: throw Aborted(std::move(failure));
    case grpc::StatusCode::OUT_OF_RANGE: throw OutOfRange(std::move(failure));
    case grpc::StatusCode::UNIMPLEMENTED: throw Unimplemented(std::move(failure));
    case grpc::StatusCode::INTERNAL: throw InternalError(std::move(failure));
    case grpc::StatusCode::UNAVAILABLE: throw Unavailable(std::move(failure));
    default: throw Error(std::move(failure));
  }
}

}  // namespace sluice
