#include "sluice/client.h"

#include <chrono>
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
using Control = v1::ControlService::Stub;

constexpr int kMaxAdapters = 1000;  // of one answer

void stub_of(const Lease& lease, Stub*& stub) { stub = &lease.stub(); }
void stub_of(const Lease& lease, Control*& stub) { stub = &lease.control(); }

// Calls a unary method, and repeats it as the policy says. Throws Error.
template <typename Service, typename Asked, typename Answer>
Answer unary(Pool& pool, std::optional<Duration> timeout, const Asked& asked,
             grpc::Status (Service::*method)(grpc::ClientContext*, const Asked&, Answer*)) {
  Attempts attempts = pool.attempts(timeout);
  const Line* avoid = nullptr;
  for (;;) {
    Answer answer;
    std::optional<Duration> pause;
    {
      const Lease lease = pool.lease(avoid);
      avoid = lease.line();
      const auto context = pool.context(attempts.left(Clock::now()));
      Service* stub = nullptr;
      stub_of(lease, stub);
      const grpc::Status status = (stub->*method)(context.get(), asked, &answer);
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

v1::Adapter Client::load_adapter(const v1::LoadAdapterRequest& request) {
  return unary(*pool_, std::nullopt, request, &Control::LoadAdapter).adapter();
}

void Client::unload_adapter(const std::string& name, std::optional<Duration> grace) {
  v1::UnloadAdapterRequest asked;
  asked.set_adapter(name);
  if (grace) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(*grace);
    asked.mutable_grace()->set_seconds(seconds.count());
    asked.mutable_grace()->set_nanos(static_cast<std::int32_t>((*grace - seconds).count()));
  }
  unary(*pool_, std::nullopt, asked, &Control::UnloadAdapter);
}

std::vector<v1::Adapter> Client::adapters() {
  std::vector<v1::Adapter> found;
  v1::ListAdaptersRequest asked;
  asked.set_page_size(kMaxAdapters);
  do {
    const v1::ListAdaptersResponse page = unary(*pool_, std::nullopt, asked, &Control::ListAdapters);
    found.insert(found.end(), page.adapters().begin(), page.adapters().end());
    asked.set_page_token(page.next_page_token());
  } while (!asked.page_token().empty());
  return found;
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
