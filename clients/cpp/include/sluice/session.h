// Many generations on one Converse call, each with its own credit.
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

// How a generation of a session is opened.
struct Opening {
  // Tokens that the server may sample ahead of the reader; 0 is no limit.
  std::uint32_t window = 256;
  // Give back what the reader has taken, half a window at a time; else `Generation::grant` does.
  bool grants = true;
  // Sampling waits for `close_input`; `append` brings more prompt.
  bool keep_input_open = false;
};

// A range of its deltas, like Stream. Its reader alone may call next, the range, update and progress; the rest is for
// any thread.
class Generation : public Deltas<Generation> {
 public:
  explicit Generation(std::unique_ptr<Opened> opened);
  Generation(Generation&&) noexcept;
  Generation& operator=(Generation&&) noexcept;
  // Ends it, unless it has ended.
  ~Generation();

  // The next delta, valid until the next call, which gives back its credit; nullptr at the end. Throws Error.
  const v1::Delta* next();
  // Lets the server sample so many more tokens.
  void grant(std::uint32_t tokens);
  // More prompt, while the input is open.
  void append(const std::string& text);
  // The prompt is complete.
  void close_input();
  // Changes parameters from the next token on.
  void update(const v1::Update& update);
  // Ends it; its reader gets Cancelled.
  void cancel();
  const Progress& progress() const;
  int num_broken() const;

 private:
  std::unique_ptr<Opened> opened_;
};

// When the call is lost, its generations are resumed, and later ones are opened on a new call.
class Session {
 public:
  explicit Session(std::unique_ptr<Wires> wires);
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  // Cancels what still runs.
  ~Session();

  Generation open(const Request& request, Opening opening = {});

 private:
  std::unique_ptr<Wires> wires_;
};

}  // namespace sluice
