// Threads that share out the pieces of one job at a time.
//
// The caller works too and waits for pieces, never for threads: a helper that the operating system has taken off its
// core costs nothing unless it holds a piece. OpenMP's barrier waits for every thread, and with other busy processes on
// the machine that took milliseconds. Helpers spin for a moment, so that the kernels of one step find them awake, then
// sleep and leave their core to others.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {

constexpr int64_t SMALL = 1 << 15;  // multiply-adds that are not worth another thread's attention

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // The pool of this process. Its threads end with the process: nothing of theirs needs to be saved.
  static Pool& instance() {
    static Pool* pool = new Pool();
    return *pool;
  }

  // Threads that take part, the caller's among them. Grows only: a helper above the limit sleeps on.
  void set_threads(int threads) {
    limit_.store(threads < 1 ? 1 : threads);
    while (static_cast<int>(helpers_.size()) + 1 < threads) {
      const int index = static_cast<int>(helpers_.size()) + 1;
      helpers_.emplace_back([this, index] { help(index); });
      helpers_.back().detach();
    }
  }

  int threads() const { return limit_.load(std::memory_order_relaxed); }

  // Calls work(piece) once for each piece in [0, pieces), begun in ascending order; returns when all are done. One
  // caller at a time.
  template <typename Work>
  void run(int pieces, const Work& work) {
    if (pieces <= 1 || threads() == 1) {
      for (int piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    const auto ascending = [&](int left) { work(pieces - 1 - left); };  // a ticket counts down
    call_ = [](const void* context, int left) { (*static_cast<decltype(&ascending)>(context))(left); };
    context_ = &ascending;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | static_cast<uint64_t>(pieces), std::memory_order_release);
    bell_.fetch_add(1);
    bell_.notify_all();  // a system call only when somebody sleeps
    work_on(job & 0xffffffffu);
    for (int waited = 0; done_.load(std::memory_order_acquire) < pieces; ++waited) {
      if (waited < SPINS) breathe();
      else std::this_thread::yield();  // the helper that holds the last piece may need this core
    }
  }

 private:
  static constexpr int SPINS = 4000;  // about 100 µs

  // Takes pieces of `job` while there are any. The count is part of the ticket, so that a helper that wakes late can
  // never take a piece of another job than the one it looked at.
  void work_on(uint64_t job) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == job && (ticket & 0xffffffffu) != 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      call_(context_, static_cast<int>((ticket & 0xffffffffu) - 1));
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void help(int index) {
    uint32_t heard = bell_.load();
    for (;;) {
      for (int spins = 0; bell_.load(std::memory_order_acquire) == heard && spins < SPINS; ++spins) breathe();
      bell_.wait(heard);
      heard = bell_.load(std::memory_order_acquire);
      if (index < threads()) work_on(ticket_.load(std::memory_order_acquire) >> 32);
    }
  }

  std::vector<std::thread> helpers_;
  std::atomic<int> limit_{1};
  void (*call_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};  // job << 32 | pieces not yet taken
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<uint32_t> bell_{0};
};

}  // namespace sluice
