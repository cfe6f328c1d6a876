// The channels of one client: which server a call goes to, and on which channel there. Channels are opened as calls
// overlap; a call takes the channel with fewest calls.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attempts.h"
#include "sluice/options.h"
#include "sluice/v1/control.grpc.pb.h"
#include "sluice/v1/inference.grpc.pb.h"

namespace sluice {

struct Address;

// A channel, its stubs, and the calls on it.
struct Line {
  Address* address = nullptr;
  std::unique_ptr<v1::InferenceService::Stub> stub;
  std::unique_ptr<v1::ControlService::Stub> control;
  std::size_t num_calls = 0;  // guarded by the pool
};

// A service, with its own gateways and engines. Guarded by the pool.
struct Address {
  std::string target;
  std::size_t size = 1;  // the most lines
  std::vector<std::unique_ptr<Line>> lines = {};
  Clock::time_point rests_until = {};
  int num_failed = 0;  // in a row

  std::size_t num_calls() const;
};

class Pool;

// A line in use by a call; the destructor gives it back.
class Lease {
 public:
  Lease(std::shared_ptr<Pool> pool, Line* line) : pool_(std::move(pool)), line_(line) {}
  Lease(Lease&& other) noexcept : pool_(std::move(other.pool_)), line_(other.line_) {}
  Lease& operator=(Lease&&) = delete;
  ~Lease();

  v1::InferenceService::Stub& stub() const { return *line_->stub; }
  v1::ControlService::Stub& control() const { return *line_->control; }
  const Line* line() const { return line_; }

 private:
  std::shared_ptr<Pool> pool_;  // empty after a move
  Line* line_;
};

// Lends lines to calls. A call goes to the address with fewest calls; one that failed takes another line, since
// gateways that share a port differ by connection only. An address that is lost, stopping or full is not asked for a
// while.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool(std::vector<std::string> targets, Options options);

  // Returns a line for a call: not that of the failed call, but one of its address if the call must stay there.
  Lease lease(const Line* avoid, bool stays = false);
  // Returns a line of one address, counted from 0.
  Lease lease_at(std::size_t number);
  // Takes the failure of a call. Calls that fail together count once. Returns whether another address can be asked at
  // once.
  bool failed(const Line* line, const Failure& failure);
  std::size_t num_addresses() const { return addresses_.size(); }
  // Returns the attempts at a call with this timeout.
  Attempts attempts(std::optional<Duration> timeout) const;
  // Returns a context with the key, the trace context and the deadline of a call made now.
  std::unique_ptr<grpc::ClientContext> context(std::optional<Duration> left) const;

 private:
  friend class Lease;
  // Called with the lock held.
  Address& choose();
  Lease lend(Address& address, const Line* avoid);
  Line* open(Address& address);

  const Options options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  std::mutex mutex_;
  std::vector<Address> addresses_;  // their number does not change
  int num_opened_ = 0;
};

// Cancels a generation by its id, at whatever address it is; does nothing if it has ended. Throws Error.
void cancel_generation(Pool& pool, const std::string& generation_id);

}  // namespace sluice
