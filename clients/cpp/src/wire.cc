#include "wire.h"

#include <utility>

#include "failure.h"

namespace sluice {

void Inbox::put(News news) {
  {
    const std::lock_guard lock(mutex_);
    news_.push_back(std::move(news));
  }
  filled_.notify_one();
}

News Inbox::take() {
  std::unique_lock lock(mutex_);
  filled_.wait(lock, [this] { return !news_.empty(); });
  News first = std::move(news_.front());
  news_.pop_front();
  return first;
}

std::shared_ptr<Wire> Wire::open(Pool& pool) {
  const std::shared_ptr<Wire> wire(new Wire(pool.lease(nullptr), pool.context({})));
  wire->self_ = wire;
  wire->lease_.stub().async()->Converse(wire->context_.get(), wire.get());
  wire->AddHold();  // released after the last frame, since frames are written from any thread
  wire->StartRead(&wire->read_);
  wire->StartCall();
  return wire;
}

Wire::Wire(Lease lease, std::unique_ptr<grpc::ClientContext> context)
    : lease_(std::move(lease)), context_(std::move(context)) {}

std::uint64_t Wire::start(std::shared_ptr<Inbox> inbox, v1::ConverseRequest open) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t tag = ++last_tag_;
  if (lost_) {
    inbox->put(*lost_);
    return tag;
  }
  inboxes_.emplace(tag, std::move(inbox));
  open.set_tag(tag);
  frames_.push_back(std::move(open));
  write();
  return tag;
}

void Wire::send(v1::ConverseRequest frame) {
  const std::lock_guard lock(mutex_);
  if (inboxes_.count(frame.tag()) == 0) return;
  frames_.push_back(std::move(frame));
  write();
}

void Wire::close() {
  context_->TryCancel();
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return lost_.has_value(); });
}

bool Wire::takes_more() {
  const std::lock_guard lock(mutex_);
  return !is_going_away_ && !is_lost_;
}

bool Wire::is_lost() {
  const std::lock_guard lock(mutex_);
  return is_lost_;
}

void Wire::OnReadDone(bool ok) {
  if (ok) {
    google::protobuf::RepeatedPtrField<v1::ConverseResponse> further;
    further.Swap(read_.mutable_more());
    deliver(read_);
    for (v1::ConverseResponse& frame : further) deliver(frame);
    StartRead(&read_);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    is_lost_ = true;
  }
  RemoveHold();
}

void Wire::OnWriteDone(bool ok) {
  const std::lock_guard lock(mutex_);
  is_writing_ = false;
  frames_.pop_front();
  if (ok) write();
}

void Wire::OnDone(const grpc::Status& status) {
  Failure failure = status.ok() ? failure_of(grpc::StatusCode::UNAVAILABLE, "the server ended the session's stream")
                                : failure_of(status, *context_);
  std::shared_ptr<Wire> self;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  self = std::move(self_);
  for (const auto& [tag, inbox] : inboxes_) inbox->put(failure);
  inboxes_.clear();
  lost_ = std::move(failure);
  ended_.notify_all();
}

void Wire::deliver(v1::ConverseResponse& frame) {
  const std::lock_guard lock(mutex_);
  if (frame.has_going_away()) is_going_away_ = true;
  const auto found = inboxes_.find(frame.tag());
  if (found != inboxes_.end()) {
    const std::shared_ptr<Inbox> inbox = found->second;
    if (frame.has_finished() || frame.has_failed()) inboxes_.erase(found);
    inbox->put(frame.has_failed() ? News(failure_of(frame.failed())) : News(std::move(frame)));
  }
  write();
}

// Called with the lock held. Writes the next frame, or half-closes a call without further frames, which the server
// waits for.
void Wire::write() {
  if (is_writing_ || is_lost_ || is_half_closed_) return;
  if (!frames_.empty()) {
    is_writing_ = true;
    StartWrite(&frames_.front());
  } else if (is_going_away_ && inboxes_.empty()) {
    is_half_closed_ = true;
    StartWritesDone();
  }
}

}  // namespace sluice
