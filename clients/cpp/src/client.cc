#include "sluice/client.h"

#include <stdexcept>
#include <thread>
#include <utility>

#include "failure.h"
#include "following.h"
#include "pool.h"
#include "wires.h"

namespace sluice {

Client::Client(const std::string& target, Options options) : Client(std::vector{target}, std::move(options)) {}

Client::Client(std::vector<std::string> targets, Options options)
    : pool_(std::make_shared<Pool>(std::move(targets), std::move(options))) {}

namespace {

using Stub = v1::InferenceService::Stub;

// Calls a unary method, and repeats it as the policy says. Throws Error.
template <typename Asked, typename Answer>
Answer unary(Pool& pool, std::optional<Duration> timeout, const Asked& asked,
             grpc::Status (Stub::*method)(grpc::ClientContext*, const Asked&, Answer*)) {
  Attempts attempts = pool.attempts(timeout);
  const Line* avoid = nullptr;
  for (;;) {
    Answer answer;
    std::optional<Duration> pause;
    {
      const Lease lease = pool.lease(avoid);
      avoid = lease.line();
      const auto context = pool.context(attempts.left(Clock::now()));
      const grpc::Status status = (lease.stub().*method)(context.get(), asked, &answer);
      if (status.ok()) return answer;
      const Failure failure = failure_of(status, *context);
      pause = attempts.pause(failure, nullptr, pool.failed(lease.line(), failure), Clock::now(), chance());
      if (!pause) raise(failure);
    }
    std::this_thread::sleep_for(*pause);
  }
}

}  // namespace

v1::GenerateResponse Client::generate(const Request& request) {
  v1::GenerateRequest asked;
  *asked.mutable_spec() = request.spec();
  return unary(*pool_, request.timeout(), asked, &Stub::Generate);
}

v1::TokenizeResponse Client::tokenize(const Request& request) {
  const v1::GenerationSpec& spec = request.spec();
  v1::TokenizeRequest asked;
  if (spec.has_text()) {
    asked.set_text(spec.text());
  } else if (spec.has_chat()) {
    *asked.mutable_chat() = spec.chat();
  } else {
    throw std::invalid_argument("only a text or a chat can be tokenized");
  }
  if (spec.has_model()) asked.set_model(spec.model());
  if (spec.has_revision()) asked.set_revision(spec.revision());
  return unary(*pool_, request.timeout(), asked, &Stub::Tokenize);
}

std::string Client::detokenize(const std::vector<std::uint32_t>& ids) {
  v1::DetokenizeRequest asked;
  asked.mutable_token_ids()->Add(ids.begin(), ids.end());
  return unary(*pool_, std::nullopt, asked, &Stub::Detokenize).text();
}

Stream Client::stream(const Request& request) {
  return Stream(std::make_unique<Following>(pool_, request.spec(), request.timeout()));
}

Session Client::converse() { return session_of(pool_); }

void Client::cancel(const std::string& generation_id) { cancel_generation(*pool_, generation_id); }

Stream::Stream(std::unique_ptr<Following> following) : following_(std::move(following)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

const v1::Delta* Stream::next() { return following_->next(); }

void Stream::cancel() { following_->cancel(); }

const Progress& Stream::progress() const { return following_->progress(); }

int Stream::num_broken() const { return following_->num_broken(); }

}  // namespace sluice
