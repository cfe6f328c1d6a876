#include "sluice/request.h"

#include <stdexcept>

namespace sluice {
namespace {

v1::Role role_of(const std::string& name) {
  const std::pair<const char*, v1::Role> roles[] = {
      {"system", v1::ROLE_SYSTEM},       {"developer", v1::ROLE_DEVELOPER}, {"user", v1::ROLE_USER},
      {"assistant", v1::ROLE_ASSISTANT}, {"tool", v1::ROLE_TOOL},
  };
  for (const auto& [known, role] : roles) {
    if (name == known) return role;
  }
  throw std::invalid_argument("\"" + name + "\" is no role; there are system, developer, user, assistant and tool");
}

}  // namespace

Request::Request(const char* text) : Request(std::string(text)) {}

Request::Request(std::string text) { spec_.set_text(std::move(text)); }

Request::Request(v1::GenerationSpec spec) : spec_(std::move(spec)) {}

Request Request::of_tokens(const std::vector<std::uint32_t>& ids) {
  v1::GenerationSpec spec;
  spec.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  return Request(std::move(spec));
}

Request Request::chat(std::initializer_list<std::pair<std::string, std::string>> messages) {
  v1::GenerationSpec spec;
  for (const auto& [role, text] : messages) {
    v1::ChatMessage* message = spec.mutable_chat()->add_messages();
    message->set_role(role_of(role));
    message->add_parts()->set_text(text);
  }
  return Request(std::move(spec));
}

Request& Request::image(const std::string& file) {
  if (spec_.chat().messages().empty()) {
    throw std::invalid_argument("an image is a part of a chat's message, and there is none");
  }
  auto* parts = spec_.mutable_chat()->mutable_messages(spec_.chat().messages_size() - 1)->mutable_parts();
  parts->Add()->mutable_image()->set_data(file);
  if (parts->size() > 1) parts->SwapElements(parts->size() - 2, parts->size() - 1);
  return *this;
}

Request& Request::model(const std::string& id) {
  spec_.set_model(id);
  return *this;
}

Request& Request::max_tokens(std::uint32_t num) {
  spec_.mutable_sampling()->set_max_tokens(num);
  return *this;
}

Request& Request::temperature(double value) {
  spec_.mutable_sampling()->set_temperature(value);
  return *this;
}

Request& Request::top_k(std::uint32_t num) {
  spec_.mutable_sampling()->set_top_k(num);
  return *this;
}

Request& Request::top_p(double mass) {
  spec_.mutable_sampling()->set_top_p(mass);
  return *this;
}

Request& Request::seed(std::uint64_t key) {
  spec_.mutable_sampling()->set_seed(key);
  return *this;
}

Request& Request::n(std::uint32_t num) {
  spec_.mutable_sampling()->set_n(num);
  return *this;
}

Request& Request::stop(const std::string& text) {
  spec_.mutable_stop()->add_strings(text);
  return *this;
}

Request& Request::ignore_eos(bool ignores) {
  spec_.mutable_stop()->set_ignore_eos(ignores);
  return *this;
}

Request& Request::logprobs(std::uint32_t num) {
  spec_.mutable_output()->set_logprobs(num);
  return *this;
}

Request& Request::json_schema(const std::string& schema) {
  spec_.mutable_constraint()->set_json_schema(schema);
  return *this;
}

Request& Request::choices(const std::vector<std::string>& texts) {
  auto* choice = spec_.mutable_constraint()->mutable_choice();
  choice->mutable_texts()->Assign(texts.begin(), texts.end());
  return *this;
}

Request& Request::priority(std::int32_t value) {
  spec_.mutable_scheduling()->set_priority(value);
  return *this;
}

Request& Request::detach() {
  spec_.mutable_scheduling()->set_on_disconnect(v1::DISCONNECT_ACTION_DETACH);
  return *this;
}

Request& Request::timeout(Duration time) {
  timeout_ = time;
  return *this;
}

}  // namespace sluice
