// Sessions: many generations on one Converse call, each with its own credit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "sluice/deltas.h"
#include "sluice/progress.h"
#include "sluice/request.h"
#include "sluice/v1/inference.pb.h"

namespace sluice {

class Opened;
class Wires;

// Options with which a generation of a session is opened.
struct Opening {
  // How many tokens the server may sample ahead of the reader; 0 is no limit.
  std::uint32_t window = 256;
  // Whether the client grants credit for the tokens that were read, half a window at a time; if not, the program calls
  // `Generation::grant`.
  bool grants = true;
  // Whether sampling waits for `close_input`; `append` extends the prompt until then.
  bool keep_input_open = false;
};

// A generation of a session: a range of its deltas, like Stream. Only the reading thread may call next, update and
// progress or iterate; the other methods may be called from any thread.
class Generation : public Deltas<Generation> {
 public:
  explicit Generation(std::unique_ptr<Opened> opened);
  Generation(Generation&&) noexcept;
  Generation& operator=(Generation&&) noexcept;
  // Cancels the generation if it has not ended.
  ~Generation();

  // Returns the next delta, valid until the next call, which grants its credit again; nullptr at the end. Throws Error.
  const v1::Delta* next();
  // Grants credit: the server may sample `tokens` more tokens.
  void grant(std::uint32_t tokens);
  // Appends to the prompt while the input is open.
  void append(const std::string& text);
  // Completes the prompt: sampling starts.
  void close_input();
  // Changes sampling parameters from the next token on.
  void update(const v1::Update& update);
  // Cancels the generation; its reader gets Cancelled.
  void cancel();
  const Progress& progress() const;
  int num_broken() const;

 private:
  std::unique_ptr<Opened> opened_;
};

// A session. When its call is lost, its generations are resumed, and later ones are opened on a new call.
class Session {
 public:
  explicit Session(std::unique_ptr<Wires> wires);
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  // Cancels the generations that still run.
  ~Session();

  Generation open(const Request& request, Opening opening = {});

 private:
  std::unique_ptr<Wires> wires_;
};

}  // namespace sluice
