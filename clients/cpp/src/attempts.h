// Decides whether and when a failed call is repeated within its deadline. Time and random numbers are arguments.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "sluice/error.h"
#include "sluice/options.h"
#include "sluice/progress.h"

namespace sluice {

using Clock = std::chrono::steady_clock;

// The attempts at one call.
class Attempts {
 public:
  Attempts(const RetryPolicy& policy, std::optional<Duration> timeout, Clock::time_point now);

  // Time left until the deadline; absent without one.
  std::optional<Duration> left(Clock::time_point now) const;
  // Returns how long to wait before the next attempt; absent if there is to be none. `progress` belongs to a
  // generation, nullptr for a unary call; `elsewhere`: the next attempt may be made at another address; `chance` is a
  // random number from 0 to 1, which spreads clients that failed together.
  std::optional<Duration> pause(const Failure& failure, const Progress* progress, bool elsewhere, Clock::time_point now,
                                double chance);
  // How often the generation was lost after it had been accepted, and was resumed.
  int num_broken() const { return num_broken_; }

 private:
  std::optional<Duration> delay(const Failure& failure, bool begun, bool elsewhere, Clock::time_point now,
                                double chance) const;

  RetryPolicy policy_;
  std::optional<Clock::time_point> end_;
  Clock::time_point news_;  // time of the last event
  std::uint64_t seen_seq_ = 0;
  int num_failed_ = 0;  // failures since then
  int num_broken_ = 0;
};

// A random number from 0 to 1.
double chance();

}  // namespace sluice
