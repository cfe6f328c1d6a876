// One Converse call: its generations by tag, and the frames still to be written.
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

// The received frames of one generation, in order. Credit bounds the number of deltas; other frames are few.
class Inbox {
 public:
  void put(News news);
  News take();

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<News> news_;
};

// One Converse call. gRPC's threads run its callbacks, none of which blocks. No frame is written after the call's end;
// the read side gets the status. The object keeps itself alive until then.
class Wire : public grpc::ClientBidiReactor<v1::ConverseRequest, v1::ConverseResponse> {
 public:
  static std::shared_ptr<Wire> open(Pool& pool);

  // Sends the open frame of a generation and returns its tag. Frames with this tag are put into the inbox from now on.
  std::uint64_t start(std::shared_ptr<Inbox> inbox, v1::ConverseRequest open);
  // Sends a frame; drops it if its generation has ended.
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
  void deliver(v1::ConverseResponse& frame);
  void write();

  const Lease lease_;
  const std::unique_ptr<grpc::ClientContext> context_;
  v1::ConverseResponse read_;  // target of the running read

  std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<v1::ConverseRequest> frames_;  // guarded, as are the members below; while is_writing_ the first is in use
  std::map<std::uint64_t, std::shared_ptr<Inbox>> inboxes_;
  std::uint64_t last_tag_ = 0;
  bool is_writing_ = false;
  bool is_going_away_ = false;
  bool is_half_closed_ = false;
  bool is_lost_ = false;
  std::optional<Failure> lost_;  // how the call ended; set at its end
  std::shared_ptr<Wire> self_;   // released at the end
};

}  // namespace sluice
