#include "sluice/session.h"

#include <mutex>
#include <utility>
#include <vector>

#include "following.h"
#include "wire.h"
#include "wires.h"

namespace sluice {

// A generation of a session: read from the session's call, and by ResumeGenerate after that call is lost.
class Opened {
 public:
  Opened(std::shared_ptr<Wire> wire, std::unique_ptr<Following> rest, const Opening& opening, v1::ConverseRequest open)
      : wire_(std::move(wire)),
        rest_(std::move(rest)),
        step_(opening.grants ? opening.window / 2 + opening.window % 2 : 0),
        is_in_pieces_(opening.keep_input_open),
        inbox_(std::make_shared<Inbox>()),
        tag_(wire_->start(inbox_, std::move(open))) {}

  ~Opened() {
    if (!is_on_rest_ && !rest_->progress().finished) send([](auto& frame) { frame.mutable_cancel(); });
  }

  const v1::Delta* next() {
    give();
    while (!is_on_rest_ && !rest_->progress().finished) {
      News news = inbox_->take();
      if (const auto* failure = std::get_if<Failure>(&news)) {
        is_on_rest_ = true;
        rest_->after(*failure, wire_->line(), !is_in_pieces_);
        break;
      }
      frame_ = std::move(std::get<v1::ConverseResponse>(news));
      if (const v1::Delta* delta = rest_->progress().take(frame_)) {
        taken_ += delta->consumed();
        return delta;
      }
    }
    return is_on_rest_ ? rest_->next() : nullptr;
  }

  template <typename Fill>
  void send(Fill fill) {
    v1::ConverseRequest frame;
    frame.set_tag(tag_);
    fill(frame);
    wire_->send(std::move(frame));
  }

  void cancel() {
    send([](auto& frame) { frame.mutable_cancel(); });
    if (wire_->is_lost()) rest_->cancel();
  }

  Following& rest() { return *rest_; }

 private:
  void give() {
    if (step_ == 0 || taken_ < step_) return;
    send([this](auto& frame) { frame.mutable_grant()->set_tokens(taken_); });
    taken_ = 0;
  }

  const std::shared_ptr<Wire> wire_;
  const std::unique_ptr<Following> rest_;
  const std::uint32_t step_;  // tokens read after which as many are granted; 0: never
  const bool is_in_pieces_;   // whether the prompt was appended to, so that it cannot be resumed
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t tag_;
  v1::ConverseResponse frame_;  // owns the delta returned last
  std::uint32_t taken_ = 0;
  bool is_on_rest_ = false;
};

// The calls of a session: the one that new generations use, and earlier ones that still run.
class Wires {
 public:
  explicit Wires(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}

  ~Wires() {
    for (const auto& wire : wires_) wire->close();
  }

  std::unique_ptr<Opened> open(const Request& request, const Opening& opening) {
    v1::GenerationSpec spec = request.spec();
    if (opening.window > 0) spec.set_credit_window(opening.window);
    v1::ConverseRequest first;
    *first.mutable_open()->mutable_spec() = spec;
    first.mutable_open()->set_joined_frames(true);
    if (opening.keep_input_open) first.mutable_open()->set_keep_input_open(true);
    if (const auto timeout = request.timeout()) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(*timeout);
      first.mutable_open()->mutable_deadline()->set_seconds(seconds.count());
      first.mutable_open()->mutable_deadline()->set_nanos(static_cast<std::int32_t>((*timeout - seconds).count()));
    }
    auto rest = std::make_unique<Following>(pool_, std::move(spec), request.timeout());
    return std::make_unique<Opened>(wire(), std::move(rest), opening, std::move(first));
  }

 private:
  std::shared_ptr<Wire> wire() {
    const std::lock_guard lock(mutex_);
    if (wires_.empty() || !wires_.back()->takes_more()) {
      std::vector<std::shared_ptr<Wire>> running;
      for (auto& one : wires_) {
        if (!one->is_lost()) running.push_back(std::move(one));
      }
      wires_ = std::move(running);
      wires_.push_back(Wire::open(*pool_));
    }
    return wires_.back();
  }

  const std::shared_ptr<Pool> pool_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Wire>> wires_;
};

Session session_of(std::shared_ptr<Pool> pool) { return Session(std::make_unique<Wires>(std::move(pool))); }

Generation::Generation(std::unique_ptr<Opened> opened) : opened_(std::move(opened)) {}
Generation::Generation(Generation&&) noexcept = default;
Generation& Generation::operator=(Generation&&) noexcept = default;
Generation::~Generation() = default;

const v1::Delta* Generation::next() { return opened_->next(); }

void Generation::grant(std::uint32_t tokens) {
  opened_->send([tokens](auto& frame) { frame.mutable_grant()->set_tokens(tokens); });
}

void Generation::append(const std::string& text) {
  opened_->send([&text](auto& frame) { frame.mutable_append()->set_text(text); });
}

void Generation::close_input() {
  opened_->send([](auto& frame) { frame.mutable_close_input(); });
}

void Generation::update(const v1::Update& update) {
  opened_->rest().progress().note(update);
  opened_->send([&update](auto& frame) { *frame.mutable_update() = update; });
}

void Generation::cancel() { opened_->cancel(); }

const Progress& Generation::progress() const { return opened_->rest().progress(); }

int Generation::num_broken() const { return opened_->rest().num_broken(); }

Session::Session(std::unique_ptr<Wires> wires) : wires_(std::move(wires)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

Generation Session::open(const Request& request, Opening opening) { return Generation(wires_->open(request, opening)); }

}  // namespace sluice
