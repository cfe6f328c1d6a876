// A request with setters for the common fields; `spec` has every field of the contract.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/options.h"
#include "sluice/v1/types.pb.h"

namespace sluice {

// A prompt and its options. Options that are not set stay absent and take the model's default.
class Request {
 public:
  Request(const char* text);
  Request(std::string text);
  Request(v1::GenerationSpec spec);

  static Request of_tokens(const std::vector<std::uint32_t>& ids);
  // A chat of (role, text) pairs; roles are system, developer, user, assistant and tool. Throws std::invalid_argument
  // for another role.
  static Request chat(std::initializer_list<std::pair<std::string, std::string>> messages);

  // Puts the file of an image before the text of the last message. Throws std::invalid_argument without a chat.
  Request& image(const std::string& file);
  Request& model(const std::string& id);
  Request& max_tokens(std::uint32_t num);
  Request& temperature(double value);
  Request& top_k(std::uint32_t num);
  Request& top_p(double mass);
  Request& seed(std::uint64_t key);
  Request& n(std::uint32_t num);
  Request& stop(const std::string& text);
  Request& ignore_eos(bool ignores = true);
  Request& logprobs(std::uint32_t num);
  Request& json_schema(const std::string& schema);
  Request& choices(const std::vector<std::string>& texts);
  Request& priority(std::int32_t value);
  // Whether the server keeps the generation running when the connection is lost.
  Request& detach();
  // The timeout of the request.
  Request& timeout(Duration time);

  v1::GenerationSpec& spec() { return spec_; }
  const v1::GenerationSpec& spec() const { return spec_; }
  std::optional<Duration> timeout() const { return timeout_; }

 private:
  v1::GenerationSpec spec_;
  std::optional<Duration> timeout_;
};

}  // namespace sluice
