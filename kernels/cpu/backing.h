// A thread of the lowest priority that has the system back memory before its first use.
//
// Backing a large page takes 0.2 ms, and up to 20 in a virtual machine whose host has to find it first. Threads that
// carry requests would wait for a processor meanwhile. So this one has SCHED_IDLE: any other thread takes its processor
// at once. Such a thread may then get none for seconds, and must hold nothing that others wait for: it runs no Python,
// waits without locks, and writes to the memory, which locks only the mapping that it writes to; madvise(2) would lock
// all of the process's memory map.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace sluice {

class Backing {
 public:
  // Returns the backing of this process. Its thread begins with the first range and ends with the process; in a process
  // that was forked from one that has it, it begins again.
  static Backing& instance() {
    static Backing* backing = new Backing();
    return *backing;
  }

  // Has the memory of a range backed; its contents stay. It must stay mapped until then, or until `drop`. Returns
  // false if too many ranges wait. Only one thread may call it at a time.
  bool add(uint8_t* first, int64_t size) {
    const uint64_t added = added_.load(std::memory_order_relaxed);
    if (added - done_.load(std::memory_order_acquire) == ROOM) return false;
    if (const int64_t process = getpid(); process != begun_in_) {
      begun_in_ = process;
      std::thread([this] { serve(); }).detach();
    }
    ranges_[added % ROOM] = {first, size};
    added_.store(added + 1, std::memory_order_release);
    added_.notify_one();
    return true;
  }

  // Forgets the ranges that wait. When it returns, none is being written to.
  void drop() {
    const uint64_t added = added_.load(std::memory_order_acquire);
    dropped_.store(added, std::memory_order_release);
    if (begun_in_ != getpid()) return;
    for (uint64_t done; (done = done_.load(std::memory_order_acquire)) < added;) done_.wait(done);
  }

 private:
  struct Range {
    uint8_t* first;
    int64_t size;
  };

  static constexpr uint64_t ROOM = 1024;
  static constexpr int64_t PAGE = 4096;  // the smallest: in a large page, the first write backs all

  [[noreturn]] void serve() {
#if defined(__linux__)
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread; where it is refused, the usual priority stays
#endif
    for (uint64_t done = done_.load(std::memory_order_relaxed);;
         ++done, done_.store(done, std::memory_order_release), done_.notify_all()) {
      added_.wait(done, std::memory_order_acquire);
      const Range range = ranges_[done % ROOM];
      for (int64_t at = 0; at < range.size && dropped_.load(std::memory_order_acquire) <= done; at += PAGE) {
        uint8_t zero = 0;  // a write that changes nothing, also while others write there
        __atomic_compare_exchange_n(range.first + at, &zero, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
      }
    }
  }

  Range ranges_[ROOM];
  int64_t begun_in_ = 0;                                   // the process whose thread it is
  std::atomic<uint64_t> added_{0}, done_{0}, dropped_{0};  // numbers of ranges since the process began
};

}  // namespace sluice
