// The client: `generate`, `stream`, `converse`, `tokenize`, `detokenize`, adapters.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sluice/error.h"
#include "sluice/options.h"
#include "sluice/request.h"
#include "sluice/session.h"
#include "sluice/stream.h"
#include "sluice/v1/control.pb.h"
#include "sluice/v1/inference.pb.h"

namespace sluice {

class Pool;

// A client of one server, or of several with the same model. It connects on first use and is thread-safe. A call goes
// to the server on which the client has fewest; what one does not take, or loses, goes on at another. Streams and
// sessions may outlive it.
class Client {
 public:
  // Throws std::invalid_argument if there is no address, or if a token would be sent to another host in plaintext;
  // std::runtime_error if a TLS file cannot be read.
  explicit Client(const std::string& target, Options options = {});
  explicit Client(std::vector<std::string> targets, Options options = {});

  // Returns the whole answer at once. This and all methods below throw Error.
  v1::GenerateResponse generate(const Request& request);
  // Returns a stream of the answer's deltas.
  Stream stream(const Request& request);
  // Opens a session: many generations on one call, each with its own credit.
  Session converse();
  // Returns the tokens of the request's text or chat: id and bytes of each. Throws std::invalid_argument for token ids.
  v1::TokenizeResponse tokenize(const Request& request);
  // Returns the text of token ids, without special tokens.
  std::string detokenize(const std::vector<std::uint32_t>& ids);
  // Loads an adapter from the server's folder of adapters, and names it. Of several servers it is one that does; any
  // loads a folder, or a repository that it allows, when a request names it.
  v1::Adapter load_adapter(const v1::LoadAdapterRequest& request);
  // Takes an adapter's name away. Its generations go on to their ends, or for `grace`.
  void unload_adapter(const std::string& name, std::optional<Duration> grace = std::nullopt);
  // Returns the adapters that are loaded, by name.
  std::vector<v1::Adapter> adapters();
  // Ends a generation by its id, at whatever server it is; does nothing if it has ended.
  void cancel(const std::string& generation_id);

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace sluice
