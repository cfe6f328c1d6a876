// What the suite cannot ask of a driver: ends of life, cancels from elsewhere, what is refused before it is sent.
#include <sluice/sluice.h>

#include <cstdio>
#include <future>
#include <stdexcept>

namespace {

sluice::Request endless() { return sluice::Request("Once upon a time").max_tokens(1800).temperature(0).ignore_eos(); }

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

template <typename Thrown, typename Do>
void throws(Do act, const char* what) {
  try {
    act();
  } catch (const Thrown&) {
    return;
  }
  throw std::runtime_error(what);
}

void refused_before_it_is_sent() {
  sluice::Options options;
  options.token = "k";
  throws<std::invalid_argument>([&] { sluice::Client("192.0.2.1:1", options); }, "a token in plaintext");
  options.tls = sluice::Tls{"/nowhere.pem"};
  throws<std::runtime_error>([&] { sluice::Client("192.0.2.1:1", options); }, "a file that is not there");
  throws<std::invalid_argument>([] { sluice::Client("192.0.2.1:1").tokenize(sluice::Request::of_tokens({1})); },
                                "ids that are to be tokenized");
  throws<std::invalid_argument>([] { sluice::Request::chat({{"nobody", "Hello"}}); }, "a role that there is not");
}

void trace_goes_along(const char* address) {
  sluice::Options options;
  options.trace = [] { return sluice::Metadata{{"traceparent", "nonsense"}}; };
  try {
    sluice::Client(address, options).generate("Hello");
  } catch (const sluice::InvalidArgument& error) {
    expect(error.violations.at(0).field == "traceparent", "another field at fault");
    return;
  }
  throw std::runtime_error("the trace was not sent");
}

void cancelled_from_elsewhere(sluice::Client& client) {
  for (const bool detaches : {false, true}) {
    auto request = endless();
    auto stream = client.stream(detaches ? request.detach() : request);
    expect(stream.next() != nullptr, "no delta");
    auto cancelling = std::async(std::launch::async, [&] { stream.cancel(); });
    throws<sluice::Cancelled>([&] { stream.text(); }, "it went on");
    throws<sluice::Cancelled>([&] { stream.next(); }, "it was forgotten");
    cancelling.get();
  }
  auto never = client.stream(endless());
  never.cancel();
  throws<sluice::Cancelled>([&] { never.next(); }, "it began after its cancel");
}

void lives_end_in_any_order(const char* address) {
  auto client = std::make_unique<sluice::Client>(address);
  auto session = std::make_unique<sluice::Session>(client->converse());
  auto generation = session->open(endless());
  auto stream = client->stream(endless());
  expect(generation.next() && stream.next(), "no delta");
  { const auto left = session->open(endless()); }
  client.reset();
  session.reset();
  throws<sluice::Cancelled>([&] { generation.text(); }, "it outlived its session");
  auto moved = std::move(stream);
  expect(moved.next() != nullptr, "a stream ended with its client");
}

void ends_at_its_deadline(sluice::Client& client) {
  auto session = client.converse();
  auto generation = session.open(endless().timeout(std::chrono::milliseconds(1)));
  throws<sluice::DeadlineExceeded>([&] { generation.text(); }, "no deadline");
}

}  // namespace

int main(int, char** arguments) {
  sluice::Client client(arguments[1]);
  refused_before_it_is_sent();
  trace_goes_along(arguments[1]);
  cancelled_from_elsewhere(client);
  lives_end_in_any_order(arguments[1]);
  ends_at_its_deadline(client);
  std::puts("all as it must be");
}
