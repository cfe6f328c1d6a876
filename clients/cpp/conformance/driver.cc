// The driver of the C++ client; tests/conformance/README.md has the contract.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>

#include "asked.h"

namespace {

namespace v1 = sluice::v1;

std::mutex standard_output;

void say(const std::string& line) {
  const std::lock_guard lock(standard_output);
  std::cout << line << std::flush;
}

std::string name_of(v1::FinishReason reason) {
  std::string name = v1::FinishReason_Name(reason).substr(sizeof("FINISH_REASON_") - 1);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char one) { return std::tolower(one); });
  return name;
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("no file: " + path);
  std::ostringstream whole;
  whole << file.rdbuf();
  return whole.str();
}

sluice::Request request_of(const Asked& asked) {
  std::string text;
  for (int at = 0; at < asked.repeat; ++at) text += asked.text;
  sluice::Request request =
      asked.image.empty() ? sluice::Request(text) : sluice::Request::chat({{"user", text}}).image(read(asked.image));
  request.temperature(0);
  if (asked.max_tokens) request.max_tokens(*asked.max_tokens);
  if (asked.seed) request.seed(*asked.seed);
  if (asked.timeout_s) request.timeout(sluice::Duration(static_cast<std::int64_t>(*asked.timeout_s * 1e9)));
  return asked.choices.empty() ? request.ignore_eos() : request.choices(asked.choices);
}

std::string names_of(const std::vector<v1::Adapter>& adapters) {
  std::string found;
  for (const auto& one : adapters) found += (found.empty() ? "" : ",") + one.name();
  return found;
}

void adapters(sluice::Client& client, const std::string& name) {
  End end;
  try {
    v1::LoadAdapterRequest wanted;
    wanted.set_adapter(name);
    wanted.set_path(name);
    const auto digest = client.load_adapter(wanted).digest();
    const std::string loaded = names_of(client.adapters());
    client.unload_adapter(name, std::chrono::milliseconds(1500));
    end.text = std::to_string(digest.size()) + " " + loaded + " " + names_of(client.adapters());
  } catch (const sluice::Error& error) {
    end.error = error;
  }
  say(told(end));
}

void generate(sluice::Client& client, const Asked& asked) {
  End end;
  try {
    const auto answer = client.generate(request_of(asked));
    const v1::Output& output = answer.outputs(0);
    end.text = output.text();
    end.finish_reason = name_of(output.finish_reason());
    end.completion_tokens = answer.usage().completion_tokens();
    for (const auto& token : output.tokens()) end.token_ids.push_back(token.id());
  } catch (const sluice::Error& error) {
    end.error = error;
  }
  say(told(end));
}

// Makes the grants of the case one after the other, each when the credit so far is used up; then cancels. A stream has
// no credit.
class Granting {
 public:
  explicit Granting(const Asked& asked) : allowed_(asked.window.value_or(0)), grants_(asked.grants) {}

  void take(sluice::Generation& generation, std::uint32_t consumed) {
    consumed_ += consumed;
    if (!grants_ || consumed_ < allowed_) return;
    if (next_ == grants_->size()) {
      generation.cancel();
      return;
    }
    allowed_ += grants_->at(next_);
    generation.grant(grants_->at(next_++));
  }

  void take(sluice::Stream&, std::uint32_t) {}

 private:
  std::uint32_t allowed_;
  std::uint32_t consumed_ = 0;
  std::optional<std::vector<std::uint32_t>> grants_;
  std::size_t next_ = 0;
};

void note(End& end, const v1::Delta& delta) {
  ++end.num_deltas;
  end.seqs_rise = end.seqs_rise && delta.seq() == static_cast<std::uint64_t>(end.num_deltas);
  end.text += delta.text();
  end.num_empty += delta.tokens_size() > 0 && delta.text().empty();
  for (const auto& token : delta.tokens()) end.token_ids.push_back(token.id());
}

template <typename Source>
void follow(Source opened, const Asked& asked) {
  End end;
  Granting granting(asked);
  try {
    for (const v1::Delta& delta : opened) {
      note(end, delta);
      granting.take(opened, delta.consumed());
      if (end.num_deltas == asked.cancel_after) opened.cancel();
      if (end.num_deltas == asked.pause_after) {
        say(told_paused(opened.progress().accepted->generation_id()));
        std::string line;
        std::getline(std::cin, line);
      }
    }
  } catch (const sluice::Error& error) {
    end.error = error;
    if (error.usage) end.completion_tokens = error.usage->completion_tokens();
  }
  const sluice::Progress& progress = opened.progress();
  if (progress.finished) end.completion_tokens = progress.finished->usage().completion_tokens();
  const auto finish = progress.ends.find(0);
  if (finish != progress.ends.end()) end.finish_reason = name_of(finish->second.finish_reason());
  end.num_broken = opened.num_broken();
  say(told(end));
}

void converse(sluice::Session& session, const Asked& asked) {
  sluice::Opening opening;
  opening.window = asked.window.value_or(opening.window);
  opening.grants = !asked.grants;
  follow(session.open(request_of(asked), opening), asked);
}

std::vector<std::string> addresses_of(const std::string& text) {
  std::vector<std::string> found;
  std::istringstream parts(text);
  for (std::string one; std::getline(parts, one, ',');) found.push_back(one);
  return found;
}

sluice::Options options_of(std::map<std::string, std::string>& given) {
  sluice::Options options;
  options.token = given["--token"];
  if (given.count("--tls-ca") > 0) {
    options.tls = sluice::Tls{given["--tls-ca"], given["--tls-cert"], given["--tls-key"]};
  }
  if (given.count("--no-retry") > 0) options.retry = sluice::RetryPolicy::never();
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int at = 1; at < argc; ++at) {
    const std::string name = argv[at];
    given[name] = name == "--no-retry" || at + 1 == argc ? "" : argv[++at];
  }
  std::string line;
  std::getline(std::cin, line);
  const Asked asked = asked_of(line);
  sluice::Client client(addresses_of(given["--address"]), options_of(given));
  sluice::Session session = client.converse();
  std::vector<std::future<void>> jobs;
  for (int at = 0; at < asked.count; ++at) {
    jobs.push_back(std::async(std::launch::async, [&] {
      if (asked.call == "generate") return generate(client, asked);
      if (asked.call == "adapters") return adapters(client, asked.text);
      if (asked.call == "stream") return follow(client.stream(request_of(asked)), asked);
      converse(session, asked);
    }));
  }
  for (auto& job : jobs) job.get();
}
