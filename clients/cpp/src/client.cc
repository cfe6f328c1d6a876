#include "sluice/client.h"

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

v1::GenerateResponse Client::generate(const Request& request) {
  v1::GenerateRequest asked;
  *asked.mutable_spec() = request.spec();
  Attempts attempts = pool_->attempts(request.timeout());
  const Line* avoid = nullptr;
  for (;;) {
    v1::GenerateResponse answer;
    std::optional<Duration> pause;
    {
      const Lease lease = pool_->lease(avoid);
      avoid = lease.line();
      const auto context = pool_->context(attempts.left(Clock::now()));
      const grpc::Status status = lease.stub().Generate(context.get(), asked, &answer);
      if (status.ok()) return answer;
      const Failure failure = failure_of(status, *context);
      pause = attempts.pause(failure, nullptr, Clock::now(), chance());
      if (!pause) raise(failure);
    }
    std::this_thread::sleep_for(*pause);
  }
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
