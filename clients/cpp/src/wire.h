// One Converse call: who has which tag, and what is still to be written.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <variant>

#include "pool.h"
#include "sluice/error.h"
#include "sluice/v1/inference.pb.h"

namespace sluice {

using News = std::variant<v1::ConverseResponse, Failure>;

// The news of one generation, in order: as many as its credit allows, and its few other frames.
class Inbox {
 public:
  void put(News news);
  News take();

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<News> news_;
};

// gRPC's threads read and write it; nobody waits in them. Nothing is written after its end: the status comes from the
// read side. Keeps itself alive until then.
class Wire : public grpc::ClientBidiReactor<v1::ConverseRequest, v1::ConverseResponse> {
 public:
  static std::shared_ptr<Wire> open(Pool& pool);

  // Sends the open of a generation; what comes under its tag, which is returned, is put into its inbox from now on.
  std::uint64_t start(std::shared_ptr<Inbox> inbox, v1::ConverseRequest open);
  // Sends a frame; one for a generation that has ended is dropped.
  void send(v1::ConverseRequest frame);
  // Cancels the call and waits for its end.
  void close();

  bool takes_more();
  bool is_lost();
  const Line* line() const { return lease_.line(); }

 private:
  Wire(Lease lease, std::unique_ptr<grpc::ClientContext> context);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void deliver();
  void write();

  const Lease lease_;
  const std::unique_ptr<grpc::ClientContext> context_;
  v1::ConverseResponse read_;  // of the read that runs

  std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<v1::ConverseRequest> frames_;  // guarded, as what follows; the first is being written while is_writing_
  std::map<std::uint64_t, std::shared_ptr<Inbox>> inboxes_;
  std::uint64_t last_tag_ = 0;
  bool is_writing_ = false;
  bool is_going_away_ = false;
  bool is_half_closed_ = false;
  bool is_lost_ = false;
  std::optional<Failure> lost_;  // how; set with the end
  std::shared_ptr<Wire> self_;   // until the end
};

}  // namespace sluice
