#include "pool.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "failure.h"

namespace sluice {
namespace {

constexpr int kMaxReceiveBytes = 64 << 20;  // the largest message that a server sends
constexpr auto kCancelTimeout = std::chrono::seconds(10);

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

bool is_local(const std::string& target) {
  for (const char* start : {"unix:", "unix-abstract:", "localhost:", "127.", "[::1]:"}) {
    if (starts_with(target, start)) return true;
  }
  return false;
}

const std::vector<std::string>& checked(const std::vector<std::string>& targets, const Options& options) {
  if (targets.empty() || options.channels < 1) {
    throw std::invalid_argument("a client needs an address and at least one channel");
  }
  for (const std::string& target : targets) {
    if (!options.token.empty() && !options.tls && !is_local(target)) {
      throw std::invalid_argument("the token would be sent to " + target + " in plaintext: set Options::tls");
    }
  }
  return targets;
}

std::string content(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::ChannelCredentials> credentials_of(const std::optional<Tls>& tls) {
  if (!tls) return grpc::InsecureChannelCredentials();
  if (tls->certificate.empty() != tls->key.empty()) {
    throw std::invalid_argument("certificate and key are needed together");
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = content(tls->ca);
  options.pem_cert_chain = content(tls->certificate);
  options.pem_private_key = content(tls->key);
  return grpc::SslCredentials(options);
}

grpc::ChannelArguments arguments(int number) {
  grpc::ChannelArguments made;
  made.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  made.SetMaxSendMessageSize(-1);
  // Small windows: when a reader stops, thousands of messages would otherwise pile up in the transport.
  made.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  made.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65536);
  made.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  made.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  made.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  made.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  made.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  made.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  // Unknown to gRPC. It makes the channels' arguments differ, since equal channels would share a connection.
  made.SetInt("sluice.connection", number);
  return made;
}

}  // namespace

Lease::~Lease() {
  if (!pool_) return;
  const std::lock_guard lock(pool_->mutex_);
  --line_->num_calls;
}

Pool::Pool(std::vector<std::string> targets, Options options)
    : targets_(checked(targets, options)), options_(std::move(options)), credentials_(credentials_of(options_.tls)) {}

Lease Pool::lease(const Line* avoid) {
  const std::lock_guard lock(mutex_);
  Line* best = nullptr;
  for (const auto& one : lines_) {
    if (one.get() != avoid && (!best || one->num_calls < best->num_calls)) best = one.get();
  }
  const std::size_t size = std::max(options_.channels, targets_.size());
  if ((!best || best->num_calls > 0) && lines_.size() < size) best = open();
  if (!best) best = lines_.front().get();
  ++best->num_calls;
  return {shared_from_this(), best};
}

Attempts Pool::attempts(std::optional<Duration> timeout) const {
  return {options_.retry, timeout ? timeout : options_.timeout, Clock::now()};
}

std::unique_ptr<grpc::ClientContext> Pool::context(std::optional<Duration> left) const {
  auto made = std::make_unique<grpc::ClientContext>();
  if (!options_.token.empty()) made->AddMetadata("authorization", "Bearer " + options_.token);
  if (options_.trace) {
    for (const auto& [key, value] : options_.trace()) made->AddMetadata(key, value);
  }
  if (left) {
    using Wall = std::chrono::system_clock;
    made->set_deadline(Wall::now() + std::chrono::duration_cast<Wall::duration>(*left));
  }
  return made;
}

Line* Pool::open() {
  const std::size_t number = lines_.size();
  const std::string& target = targets_[number % targets_.size()];
  auto line = std::make_unique<Line>();
  const auto channel = grpc::CreateCustomChannel(target, credentials_, arguments(static_cast<int>(number)));
  line->stub = v1::InferenceService::NewStub(channel);
  return lines_.emplace_back(std::move(line)).get();
}

void cancel_generation(Pool& pool, const std::string& generation_id) {
  v1::CancelGenerationRequest request;
  v1::CancelGenerationResponse answer;
  request.set_generation_id(generation_id);
  const Lease lease = pool.lease(nullptr);
  const auto context = pool.context(kCancelTimeout);
  const grpc::Status status = lease.stub().CancelGeneration(context.get(), request, &answer);
  if (!status.ok() && status.error_code() != grpc::StatusCode::NOT_FOUND) raise(failure_of(status, *context));
}

}  // namespace sluice
