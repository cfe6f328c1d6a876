#include "attempts.h"

#include <algorithm>
#include <random>

namespace sluice {
namespace {

// Reasons for which another attempt, at this or another server, may succeed: the server is stopping or full. The error
// for a deadline that cannot be met has RetryInfo too, but only a longer deadline helps.
bool helps(const Failure& failure, bool begun, bool elsewhere) {
  switch (failure.code) {
    case grpc::StatusCode::UNAVAILABLE: return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return failure.retry_after && failure.reason != "DEADLINE_UNATTAINABLE";
    case grpc::StatusCode::ABORTED: return begun && failure.reason == "SLOW_CONSUMER";
    // Another address may still serve the revision that it began with.
    case grpc::StatusCode::FAILED_PRECONDITION: return begun && elsewhere && failure.reason == "REVISION_CHANGED";
    default: return false;
  }
}

}  // namespace

Attempts::Attempts(const RetryPolicy& policy, std::optional<Duration> timeout, Clock::time_point now)
    : policy_(policy), news_(now) {
  if (timeout) end_ = now + *timeout;
}

std::optional<Duration> Attempts::left(Clock::time_point now) const {
  if (!end_) return {};
  return std::max<Duration>(*end_ - now, Duration(0));
}

std::optional<Duration> Attempts::pause(const Failure& failure, const Progress* progress, bool elsewhere,
                                        Clock::time_point now, double chance) {
  const bool begun = progress && progress->accepted;
  if (progress && progress->last_seq > seen_seq_) {
    seen_seq_ = progress->last_seq;
    num_failed_ = 0;
    news_ = now;
  }
  ++num_failed_;
  const auto found = delay(failure, begun, elsewhere, now, chance);
  if (!found || (progress && !progress->can_go_on())) return {};
  if (end_ && now + *found >= *end_) return {};
  num_broken_ += begun;
  return found;
}

std::optional<Duration> Attempts::delay(const Failure& failure, bool begun, bool elsewhere, Clock::time_point now,
                                        double chance) const {
  if (!helps(failure, begun, elsewhere)) return {};
  if (begun ? now - news_ >= policy_.patience : num_failed_ >= policy_.attempts) return {};
  // What one address names does not concern another.
  const Duration asked = elsewhere ? Duration(0) : failure.retry_after.value_or(Duration(0));
  if (asked > policy_.patience) return {};
  const Duration own = std::min(policy_.first_delay * (1 << std::min(num_failed_ - 1, 16)), policy_.max_delay);
  return std::max(asked, std::chrono::duration_cast<Duration>(own * (0.5 + chance / 2)));
}

double chance() {
  thread_local std::minstd_rand source{std::random_device{}()};
  return std::uniform_real_distribution<>(0, 1)(source);
}

}  // namespace sluice
