// Reads one generation over all the calls that it takes.
#pragma once

#include <grpcpp/client_context.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "attempts.h"
#include "pool.h"
#include "sluice/error.h"
#include "sluice/progress.h"

namespace sluice {

// A call that streams a generation: StreamGenerate or ResumeGenerate.
class Call {
 public:
  virtual ~Call() = default;
  // Reads the next event; returns false at the end.
  virtual bool read() = 0;
  // Returns the delta of the last event; nullptr if it has none or the delta was received before.
  virtual const v1::Delta* take(Progress& progress) = 0;
  virtual grpc::Status finish() = 0;
};

// `cancel` may be called from any thread, the other methods from the reading thread only.
class Following {
 public:
  Following(std::shared_ptr<Pool> pool, v1::GenerationSpec spec, std::optional<Duration> timeout);
  ~Following();

  const v1::Delta* next();
  void cancel();
  // Takes over a generation whose own call, on `line`, ended with `failure`. Throws it when it cannot go on.
  void after(const Failure& failure, const Line* line, bool can_go_on);

  Progress& progress() { return progress_; }
  int num_broken() const { return attempts_.num_broken(); }

 private:
  void open();
  Failure end();
  void note_id();
  void pause(const Failure& failure);
  [[noreturn]] void fail(Failure failure);

  const std::shared_ptr<Pool> pool_;
  Progress progress_;
  Attempts attempts_;
  std::optional<Failure> failed_;
  const Line* avoid_ = nullptr;  // the line of the last attempt
  std::optional<Lease> lease_;
  std::unique_ptr<Call> call_;

  std::mutex mutex_;
  std::condition_variable woken_;                 // notified by `cancel`
  bool is_cancelled_ = false;                     // guarded, as are the members below
  std::unique_ptr<grpc::ClientContext> context_;  // of call_
  std::string detached_id_;                       // the id to cancel by; "" until the generation is accepted
};

}  // namespace sluice
