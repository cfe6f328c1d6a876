// How a client reaches its servers, and when it repeats calls.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sluice {

using Duration = std::chrono::nanoseconds;

// Metadata sent with a call: pairs of a lower-case key and a value.
using Metadata = std::vector<std::pair<std::string, std::string>>;

// Paths of PEM files. Without `ca` the host's authorities are trusted; `certificate` and `key` together enable mTLS.
struct Tls {
  std::string ca = {};
  std::string certificate = {};
  std::string key = {};
};

struct RetryPolicy {
  // The most calls made before a generation is accepted; 1 never repeats a call.
  int attempts = 4;
  // Pause before the second call; it doubles with each further one, up to `max_delay`.
  Duration first_delay = std::chrono::milliseconds(50);
  Duration max_delay = std::chrono::seconds(2);
  // How long the client tries to resume a lost generation without receiving an event, and the longest delay in
  // RetryInfo that it waits for; 0 never resumes.
  Duration patience = std::chrono::seconds(30);

  static RetryPolicy never() { return {1, Duration(0), Duration(0), Duration(0)}; }
};

struct Options {
  // Sent as a bearer token with each call.
  std::string token = {};
  // Plaintext if absent.
  std::optional<Tls> tls = {};
  // Timeout of requests without one of their own.
  std::optional<Duration> timeout = {};
  // The most connections. They are opened as calls overlap, so that gateways which share a port share the work.
  std::size_t channels = 4;
  RetryPolicy retry = {};
  // Called for each call; returns the caller's W3C trace context: traceparent, and tracestate if there is one.
  std::function<Metadata()> trace = {};
};

}  // namespace sluice
