// The channels of one client. They are opened as calls overlap; a call takes the channel with fewest calls.
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
#include "sluice/v1/inference.grpc.pb.h"

namespace sluice {

// A channel, its stub, and the calls on it.
struct Line {
  std::unique_ptr<v1::InferenceService::Stub> stub;
  std::size_t num_calls = 0;  // guarded by the pool
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
  const Line* line() const { return line_; }

 private:
  std::shared_ptr<Pool> pool_;  // empty after a move
  Line* line_;
};

// Lends lines to calls. A call that failed on one line takes another, since gateways that share a port differ by
// connection only.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool(std::vector<std::string> targets, Options options);

  // Returns the line with fewest calls; a new one if all are in use and the limit allows it.
  Lease lease(const Line* avoid);
  // Returns the attempts at a call with this timeout.
  Attempts attempts(std::optional<Duration> timeout) const;
  // Returns a context with the key, the trace context and the deadline of a call made now.
  std::unique_ptr<grpc::ClientContext> context(std::optional<Duration> left) const;

 private:
  friend class Lease;
  Line* open();

  const std::vector<std::string> targets_;
  const Options options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Line>> lines_;
};

// Cancels a generation by its id; does nothing if it has ended. Throws Error.
void cancel_generation(Pool& pool, const std::string& generation_id);

}  // namespace sluice
