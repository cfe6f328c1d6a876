// The client: `generate`, `stream`, `converse`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sluice/error.h"
#include "sluice/options.h"
#include "sluice/request.h"
#include "sluice/session.h"
#include "sluice/stream.h"
#include "sluice/v1/inference.pb.h"

namespace sluice {

class Pool;

// A client of one or several servers, connecting when it is first used. Safe to use from several threads. Streams and
// sessions outlive it.
class Client {
 public:
  // Throws std::invalid_argument for a token that would be sent to another host in plaintext, and for no address;
  // std::runtime_error for a file of TLS that cannot be read.
  explicit Client(const std::string& target, Options options = {});
  explicit Client(std::vector<std::string> targets, Options options = {});

  // The whole answer at once. Throws Error, as all that follows does.
  v1::GenerateResponse generate(const Request& request);
  // The answer as it is made.
  Stream stream(const Request& request);
  // Many generations on one call, each with its own credit.
  Session converse();
  // Ends a generation by its id, through any gateway; does nothing if it has ended.
  void cancel(const std::string& generation_id);

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace sluice
