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
constexpr Duration kFirstRest = std::chrono::milliseconds(500);  // doubles with each further failure in a row
constexpr Duration kMaxRest = std::chrono::seconds(10);

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

bool is_local(const std::string& target) {
  for (const char* start : {"unix:", "unix-abstract:", "localhost:", "127.", "[::1]:"}) {
    if (starts_with(target, start)) return true;
  }
  return false;
}

std::vector<Address> addresses_of(const std::vector<std::string>& targets, const Options& options) {
  if (targets.empty() || options.channels < 1) {
    throw std::invalid_argument("a client needs an address and at least one channel");
  }
  for (const std::string& target : targets) {
    if (!options.token.empty() && !options.tls && !is_local(target)) {
      throw std::invalid_argument("the token would be sent to " + target + " in plaintext: set Options::tls");
    }
  }
  std::vector<Address> made(targets.size());
  const std::size_t size = std::max(options.channels, targets.size());
  for (std::size_t at = 0; at < targets.size(); ++at) {
    made[at].target = targets[at];
    made[at].size = size / targets.size() + (at < size % targets.size());
  }
  return made;
}

bool concerns_address(const Failure& failure) {
  return failure.code == grpc::StatusCode::UNAVAILABLE ||
         (failure.code == grpc::StatusCode::RESOURCE_EXHAUSTED && failure.reason == "QUEUE_FULL");
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

std::size_t Address::num_calls() const {
  std::size_t sum = 0;
  for (const auto& line : lines) sum += line->num_calls;
  return sum;
}

Pool::Pool(std::vector<std::string> targets, Options options)
    : options_(std::move(options)),
      credentials_(credentials_of(options_.tls)),
      addresses_(addresses_of(targets, options_)) {}

Lease Pool::lease(const Line* avoid, bool stays) {
  const std::lock_guard lock(mutex_);
  return lend(stays && avoid ? *avoid->address : choose(), avoid);
}

Lease Pool::lease_at(std::size_t number) {
  const std::lock_guard lock(mutex_);
  return lend(addresses_.at(number), nullptr);
}

bool Pool::failed(const Line* line, const Failure& failure) {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  Address& address = *line->address;
  if (concerns_address(failure) && now >= address.rests_until) {
    // After a long rest without another failure it counts as well again.
    if (now - address.rests_until > kMaxRest) address.num_failed = 0;
    const Duration own = kFirstRest * (1 << std::min(address.num_failed, 16));
    ++address.num_failed;
    address.rests_until = now + std::min(std::max(own, failure.retry_after.value_or(Duration(0))), kMaxRest);
  }
  return std::any_of(addresses_.begin(), addresses_.end(),
                     [&](const Address& one) { return &one != &address && now >= one.rests_until; });
}

// Returns the address with fewest calls among those that do not rest; the one that rests shortest if all do.
Address& Pool::choose() {
  const Clock::time_point now = Clock::now();
  const auto num = addresses_.size();
  const auto start = static_cast<std::size_t>(chance() * static_cast<double>(num));  // clients begin at different ones
  Address* best = nullptr;
  Address* next = &addresses_.front();
  for (std::size_t at = 0; at < num; ++at) {
    Address& one = addresses_[(start + at) % num];
    if (now >= one.rests_until && (!best || one.num_calls() < best->num_calls())) best = &one;
    if (one.rests_until < next->rests_until) next = &one;
  }
  return best ? *best : *next;
}

Lease Pool::lend(Address& address, const Line* avoid) {
  Line* best = nullptr;
  for (const auto& one : address.lines) {
    if (one.get() != avoid && (!best || one->num_calls < best->num_calls)) best = one.get();
  }
  if ((!best || best->num_calls > 0) && address.lines.size() < address.size) best = open(address);
  if (!best) best = address.lines.front().get();
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

Line* Pool::open(Address& address) {
  auto line = std::make_unique<Line>();
  const auto channel = grpc::CreateCustomChannel(address.target, credentials_, arguments(num_opened_++));
  line->address = &address;
  line->stub = v1::InferenceService::NewStub(channel);
  line->control = v1::ControlService::NewStub(channel);
  return address.lines.emplace_back(std::move(line)).get();
}

void cancel_generation(Pool& pool, const std::string& generation_id) {
  v1::CancelGenerationRequest request;
  request.set_generation_id(generation_id);
  std::optional<Failure> failure;
  for (std::size_t number = 0; number < pool.num_addresses(); ++number) {
    v1::CancelGenerationResponse answer;
    const Lease lease = pool.lease_at(number);
    const auto context = pool.context(kCancelTimeout);
    const grpc::Status status = lease.stub().CancelGeneration(context.get(), request, &answer);
    if (status.ok()) return;
    if (status.error_code() != grpc::StatusCode::NOT_FOUND) failure = failure_of(status, *context);
  }
  if (failure) raise(*failure);
}

}  // namespace sluice
