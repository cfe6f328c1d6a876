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

// Pairs of lower-case key and value that go along with a call.
using Metadata = std::vector<std::pair<std::string, std::string>>;

// Paths of PEM files. Without `ca` the host's authorities are trusted; `certificate` and `key` together are mTLS.
struct Tls {
  std::string ca = {};
  std::string certificate = {};
  std::string key = {};
};

struct RetryPolicy {
  // Calls made at most before a generation is accepted; 1 never repeats one.
  int attempts = 4;
  // Pause before the second; it doubles with each, up to `max_delay`.
  Duration first_delay = std::chrono::milliseconds(50);
  Duration max_delay = std::chrono::seconds(2);
  // How long a lost generation is tried without an event, and the longest RetryInfo that is obeyed; 0 never resumes
  // one.
  Duration patience = std::chrono::seconds(30);

  static RetryPolicy never() { return {1, Duration(0), Duration(0), Duration(0)}; }
};

struct Options {
  // Sent as a bearer token with each call.
  std::string token = {};
  // Absent: plaintext.
  std::optional<Tls> tls = {};
  // Deadline of calls that name none.
  std::optional<Duration> timeout = {};
  // Connections at most, opened as calls overlap, so that gateways which share a port share the work.
  std::size_t channels = 4;
  RetryPolicy retry = {};
  // Asked at each call for the W3C trace context of the caller: traceparent, and tracestate where there is one.
  std::function<Metadata()> trace = {};
};

}  // namespace sluice
