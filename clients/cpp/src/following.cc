#include "following.h"

#include <utility>

#include "failure.h"

namespace sluice {
namespace {

template <typename Response>
class CallOf : public Call {
 public:
  explicit CallOf(std::unique_ptr<grpc::ClientReader<Response>> reader) : reader_(std::move(reader)) {}
  bool read() override {
    if (num_read_ < message_.more_size()) {
      event_ = &message_.more(num_read_++);
      return true;
    }
    num_read_ = 0;
    event_ = &message_;
    return reader_->Read(&message_);
  }
  const v1::Delta* take(Progress& progress) override { return progress.take(*event_); }
  grpc::Status finish() override { return reader_->Finish(); }

 private:
  std::unique_ptr<grpc::ClientReader<Response>> reader_;
  Response message_;                   // with the events that it joins
  const Response* event_ = &message_;  // the one that was read last
  int num_read_ = 0;                   // of the further events in it
};

template <typename Response>
std::unique_ptr<Call> call_of(std::unique_ptr<grpc::ClientReader<Response>> reader) {
  return std::make_unique<CallOf<Response>>(std::move(reader));
}

}  // namespace

Following::Following(std::shared_ptr<Pool> pool, v1::GenerationSpec spec, std::optional<Duration> timeout)
    : pool_(std::move(pool)), progress_(std::move(spec)), attempts_(pool_->attempts(timeout)) {}

Following::~Following() {
  if (!call_) return;
  try {
    cancel();
  } catch (const Error&) {  // a detached generation that cannot be reached ends by its own deadline
  }
  while (call_->read()) {
  }
  end();
}

const v1::Delta* Following::next() {
  if (failed_) raise(*failed_);
  while (call_ || !progress_.finished) {
    if (!call_) open();
    if (call_->read()) {
      if (const v1::Delta* delta = call_->take(progress_)) return delta;
      note_id();
      continue;
    }
    const Failure failure = end();
    if (!progress_.finished) pause(failure);
  }
  return nullptr;
}

void Following::cancel() {
  std::string id;
  {
    const std::lock_guard lock(mutex_);
    is_cancelled_ = true;
    if (context_) context_->TryCancel();
    id = detached_id_;
  }
  woken_.notify_all();
  if (!id.empty()) cancel_generation(*pool_, id);
}

void Following::after(const Failure& failure, const Line* line, bool can_go_on) {
  avoid_ = line;
  if (!can_go_on && !progress_.detaches()) fail(failure);
  progress_.spec.clear_credit_window();  // ResumeGenerate takes no grants
  note_id();
  pause(failure);
}

void Following::open() {
  lease_.emplace(pool_->lease(avoid_, progress_.stays()));
  avoid_ = lease_->line();
  auto made = pool_->context(attempts_.left(Clock::now()));
  grpc::ClientContext* context = made.get();
  {
    const std::lock_guard lock(mutex_);
    context_ = std::move(made);
    if (is_cancelled_) context_->TryCancel();
  }
  if (!progress_.has_begun()) {
    v1::StreamGenerateRequest request;
    *request.mutable_spec() = progress_.spec;
    request.set_joined_events(true);
    call_ = call_of(lease_->stub().StreamGenerate(context, request));
  } else {
    v1::ResumeGenerateRequest request;
    *request.mutable_spec() = progress_.rest();
    request.set_joined_events(true);
    call_ = call_of(lease_->stub().ResumeGenerate(context, request));
  }
}

Failure Following::end() {
  const grpc::Status status = call_->finish();
  const Failure failure = failure_of(status, *context_);
  call_.reset();
  lease_.reset();
  const std::lock_guard lock(mutex_);
  context_.reset();
  if (!status.ok()) return failure;
  return failure_of(grpc::StatusCode::INTERNAL, "the server ended the stream before its last message");
}

void Following::note_id() {
  if (!progress_.detaches() || !progress_.accepted) return;
  const std::lock_guard lock(mutex_);
  detached_id_ = progress_.finished ? "" : progress_.accepted->generation_id();
}

void Following::pause(const Failure& failure) {
  const bool elsewhere = pool_->failed(avoid_, failure) && !progress_.stays();
  const auto time = attempts_.pause(failure, &progress_, elsewhere, Clock::now(), chance());
  if (!time) fail(failure);
  std::unique_lock lock(mutex_);
  if (!woken_.wait_for(lock, *time, [this] { return is_cancelled_; })) return;
  lock.unlock();
  fail(failure.code == grpc::StatusCode::CANCELLED
           ? failure
           : failure_of(grpc::StatusCode::CANCELLED, "the generation was cancelled"));
}

void Following::fail(Failure failure) {
  failed_ = failure;
  raise(std::move(failure));
}

}  // namespace sluice
