// A thread pool that runs the pieces of one job at a time.
//
// The caller works too and waits for pieces, never for threads: a helper thread without a core delays the job only if
// it holds a piece. OpenMP's barrier waits for every thread, which takes milliseconds when other processes are busy on
// the machine. Helpers spin for a moment, so that they are awake for the next kernel of the step, and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {

constexpr int64_t SMALL = 1 << 15;  // multiply-adds below which one thread is faster than several

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Returns the pool of this process. Its threads end with the process.
  static Pool& instance() {
    static Pool* pool = new Pool();
    return *pool;
  }

  // Sets the number of threads, the caller's included. Threads are never ended: helpers above the limit stay asleep.
  void set_threads(int threads) {
    limit_.store(threads < 1 ? 1 : threads);
    while (static_cast<int>(helpers_.size()) + 1 < threads) {
      const int index = static_cast<int>(helpers_.size()) + 1;
      helpers_.emplace_back([this, index] { help(index); });
      helpers_.back().detach();
    }
  }

  int threads() const { return limit_.load(std::memory_order_relaxed); }

  // Calls work(piece) once for each piece in [0, pieces), started in ascending order; returns when all are done. Only
  // one thread may call it at a time.
  template <typename Work>
  void run(int pieces, const Work& work) {
    if (pieces <= 1 || threads() == 1) {
      for (int piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    const auto ascending = [&](int left) { work(pieces - 1 - left); };  // tickets count down
    call_ = [](const void* context, int left) { (*static_cast<decltype(&ascending)>(context))(left); };
    context_ = &ascending;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | static_cast<uint64_t>(pieces), std::memory_order_release);
    bell_.fetch_add(1);
    bell_.notify_all();  // a system call only when a helper sleeps
    work_on(job & 0xffffffffu);
    for (int waited = 0; done_.load(std::memory_order_acquire) < pieces; ++waited) {
      if (waited < SPINS) breathe();
      else std::this_thread::yield();  // the helper that holds the last piece may need this core
    }
  }

 private:
  static constexpr int SPINS = 4000;  // about 100 µs

  // Takes pieces of `job` until none is left. The job's number is part of the ticket, so that a helper that wakes late
  // never takes a piece of a later job.
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
