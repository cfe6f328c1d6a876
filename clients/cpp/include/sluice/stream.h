// The stream of one generation's deltas.
#pragma once

#include <memory>

#include "sluice/deltas.h"
#include "sluice/progress.h"

namespace sluice {

class Following;

// A range of a generation's deltas, each once: `for (const auto& delta : stream)`. Resumes by itself when its
// connection breaks or its gateway fails. The destructor ends the generation.
class Stream : public Deltas<Stream> {
 public:
  explicit Stream(std::unique_ptr<Following> following);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // Returns the next delta, valid until the next call; nullptr at the end. Throws Error.
  const v1::Delta* next();
  // Cancels the generation, from any thread; its reader gets Cancelled.
  void cancel();
  // What was received so far. Call it from the thread that reads the stream.
  const Progress& progress() const;
  // How often the connection was lost and the generation resumed.
  int num_broken() const;

 private:
  std::unique_ptr<Following> following_;
};

}  // namespace sluice
