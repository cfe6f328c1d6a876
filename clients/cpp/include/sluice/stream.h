// One generation, read as it is made.
#pragma once

#include <memory>

#include "sluice/deltas.h"
#include "sluice/progress.h"

namespace sluice {

class Following;

// A range of its deltas, each once: `for (const auto& delta : stream)`. Goes on by itself when its connection breaks or
// its gateway dies. Its end of life ends the generation.
class Stream : public Deltas<Stream> {
 public:
  explicit Stream(std::unique_ptr<Following> following);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // The next delta, valid until the next call; nullptr at the end. Throws Error.
  const v1::Delta* next();
  // Ends the generation, from any thread; its reader gets Cancelled.
  void cancel();
  // What was received; read it from the thread that reads the stream.
  const Progress& progress() const;
  // Number of times that its connection was lost and it was resumed.
  int num_broken() const;

 private:
  std::unique_ptr<Following> following_;
};

}  // namespace sluice
