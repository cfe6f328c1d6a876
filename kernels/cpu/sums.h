// Sums of ranks that are processes of one host, over memory that they share: every rank writes its partial sums where
// all read them, and adds all of them in the order of ranks. Results are the same bits on every rank.
//
// A rank has two slots, which it fills in turn. It fills one for the next but one operation only after all ranks have
// written for the one between, and so have read what the slot held. While a rank waits it looks at the clock and at the
// life of the others: it returns what is wrong, and never hangs.
#pragma once

#include <fcntl.h>
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <vector>

#include "panels.h"

namespace sluice {

constexpr int64_t SPINS_TO_YIELD = 2000;
constexpr int64_t YIELDS_TO_LOOK = 16;           // at the clock; at lives every LOOK_S
constexpr double LOOK_S = 0.002, DOZE_S = 0.02;  // after the latter a rank sleeps between looks

// What a rank tells the others: it alone writes its line.
struct alignas(LINE) RankLine {
  std::atomic<int64_t> written;   // number of the last operation that its slot is filled for
  std::atomic<int64_t> attached;  // not 0 once the rank is there: names its process
  std::atomic<int64_t> broken;    // 1 + the rank at fault, once it has given up
};

// What a slot is filled with. Ranks must agree in all but `value`.
struct alignas(LINE) SlotHead {
  int64_t kind, rows, width, count;
  int64_t value;
};

enum class SumKind : int64_t { EXCHANGE = 1, ADD, GATHER };
enum class Fault : int64_t { NONE, ENDED, LATE, BROKEN, UNEQUAL };

// Behind the segment's first line: the lines of all ranks, then two slots of each.
struct Segment {
  char* first;
  int64_t size, slot_floats, rank;
  int file;
  double timeout_s;
  int64_t number;  // of the operation

  RankLine& line(int64_t of) const { return reinterpret_cast<RankLine*>(first + LINE)[of]; }

  SlotHead& head(int64_t of) const {
    const int64_t bytes = LINE + (slot_floats * 4 + LINE - 1) / LINE * LINE;
    return *reinterpret_cast<SlotHead*>(first + LINE * (1 + size) + (2 * of + number % 2) * bytes);
  }

  float* slot(int64_t of) const { return reinterpret_cast<float*>(&head(of) + 1); }
};

struct Outcome {
  Fault fault = Fault::NONE;
  int64_t rank = 0;  // at fault
};

// A rank holds a lock on its byte of the file while its process lives.
inline bool is_alive(const Segment& segment, int64_t rank) {
  const int64_t process = segment.line(rank).attached.load(std::memory_order_acquire);
  if (process == 0 || process == segment.line(segment.rank).attached.load(std::memory_order_relaxed)) return true;
  struct flock lock{};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
  return fcntl(segment.file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// What is wrong with another rank, whichever is waited for: the first cause is a rank that has ended.
inline Outcome look(const Segment& segment) {
  for (int64_t rank = 0; rank < segment.size; ++rank)
    if (!is_alive(segment, rank)) return {Fault::ENDED, rank};
  for (int64_t rank = 0; rank < segment.size; ++rank) {
    const int64_t broken = segment.line(rank).broken.load(std::memory_order_acquire);
    if (broken != 0) return {Fault::BROKEN, broken - 1};
  }
  return {};
}

// Waits until a rank has written for this operation.
inline Outcome await(const Segment& segment, int64_t rank) {
  using Clock = std::chrono::steady_clock;
  const std::atomic<int64_t>& written = segment.line(rank).written;
  const auto is_there = [&] { return written.load(std::memory_order_acquire) >= segment.number; };
  for (int64_t spins = 0; spins < SPINS_TO_YIELD; ++spins) {
    if (is_there()) return {};
    breathe();
  }
  const Clock::time_point start = Clock::now();
  double looked = -LOOK_S;
  for (int64_t yields = 1; !is_there(); ++yields) {
    sched_yield();
    if (yields % YIELDS_TO_LOOK != 0 && looked < DOZE_S) continue;
    const double now = std::chrono::duration<double>(Clock::now() - start).count();
    if (now - looked < LOOK_S) continue;
    looked = now;
    const Outcome found = look(segment);
    if (is_there()) break;  // a rank may end, or give up, behind what it wrote last
    if (found.fault != Fault::NONE) return found;
    if (now > segment.timeout_s) return {Fault::LATE, rank};
    if (now > DOZE_S) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return {};
}

// Tells that this rank's slot is filled, and waits for those of all ranks.
inline Outcome meet(const Segment& segment, const SlotHead& own) {
  segment.head(segment.rank) = own;
  segment.line(segment.rank).written.store(segment.number, std::memory_order_release);
  for (int64_t rank = 0; rank < segment.size; ++rank) {
    const Outcome found = await(segment, rank);
    if (found.fault != Fault::NONE) return found;
  }
  const SlotHead& first = segment.head(0);
  for (int64_t rank = 1; rank < segment.size; ++rank) {
    const SlotHead& one = segment.head(rank);
    if (one.kind != first.kind || one.rows != first.rows || one.width != first.width || one.count != first.count)
      return {Fault::UNEQUAL, rank};
  }
  return {};
}

// Tells the others that this rank goes on no more, if something is wrong.
inline void tell(const Segment& segment, const Outcome& found) {
  if (found.fault != Fault::NONE) segment.line(segment.rank).broken.store(1 + found.rank, std::memory_order_release);
}

// `values` [size]: what each rank gives.
struct Exchange {
  Segment segment;
  int64_t value;
  int64_t* values;
  Outcome outcome;
};

inline void run(Exchange& job) {
  job.outcome = meet(job.segment, {static_cast<int64_t>(SumKind::EXCHANGE), 0, 0, 0, job.value});
  if (job.outcome.fault != Fault::NONE) return;
  for (int64_t rank = 0; rank < job.segment.size; ++rank) job.values[rank] = job.segment.head(rank).value;
}

// into [rows, width] += the partial sums of all ranks.
struct AddSums {
  Segment segment;
  float* into;
  int64_t rows, width;
  std::vector<const float*> partials;  // this rank's
  Outcome outcome;
};

// `num` numbers of `into` += the sum of those of the parts, in their order.
inline void add_in_order(const std::vector<const float*>& parts, int64_t num, float* into) {
  const auto add = [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
      Vec total = load(parts[0] + i);
      for (size_t one = 1; one < parts.size(); ++one) total += load(parts[one] + i);
      store(into + i, load(into + i) + total);
    }
    for (; i < end; ++i) {
      float total = parts[0][i];
      for (size_t one = 1; one < parts.size(); ++one) total += parts[one][i];
      into[i] += total;
    }
  };
  Pool& pool = Pool::instance();
  const int64_t pieces = num <= SMALL ? 1 : pool.threads();
  pool.run(static_cast<int>(pieces), [&](int64_t at) { add(num * at / pieces, num * (at + 1) / pieces); });
}

inline void run(AddSums& job) {
  const int64_t count = static_cast<int64_t>(job.partials.size()), all = job.rows * job.width;
  const int64_t most = job.segment.slot_floats / count;
  for (int64_t begin = 0; begin < all || begin == 0; begin += most, ++job.segment.number) {
    const int64_t num = std::min(most, all - begin);
    float* own = job.segment.slot(job.segment.rank);
    for (int64_t one = 0; one < count; ++one)
      if (const float* from = job.partials[one] + begin; from != own + one * num)
        std::memmove(own + one * num, from, num * sizeof(float));
    job.outcome = meet(job.segment, {static_cast<int64_t>(SumKind::ADD), job.rows, job.width, count, begin});
    if (job.outcome.fault != Fault::NONE) return;
    std::vector<const float*> parts;
    for (int64_t rank = 0; rank < job.segment.size; ++rank)
      for (int64_t one = 0; one < count; ++one) parts.push_back(job.segment.slot(rank) + one * num);
    add_in_order(parts, num, job.into + begin);
  }
}

// All ranks' columns side by side, in `to` [rows, the sum of widths] at rank 0. Its own go there straight: nobody else
// reads them.
struct GatherSums {
  Segment segment;
  const float* part;  // [rows, widths[rank]]
  int64_t rows;
  const int64_t* widths;  // [size]
  float* to;              // or null
  Outcome outcome;
};

inline void run(GatherSums& job) {
  const Segment& segment = job.segment;
  const int64_t widest = *std::max_element(job.widths, job.widths + segment.size), own = job.widths[segment.rank];
  int64_t total = 0;
  for (int64_t rank = 0; rank < segment.size; ++rank) total += job.widths[rank];
  for (int64_t begin = 0; begin < job.rows * widest; begin += segment.slot_floats, ++job.segment.number) {
    const auto end = [&](int64_t width) { return std::min(begin + segment.slot_floats, job.rows * width); };
    if (job.to == nullptr && begin < end(own))
      std::memcpy(segment.slot(segment.rank), job.part + begin, (end(own) - begin) * sizeof(float));
    job.outcome = meet(segment, {static_cast<int64_t>(SumKind::GATHER), job.rows, widest, 1, begin});
    if (job.outcome.fault != Fault::NONE) return;
    for (int64_t rank = 0, left = 0; job.to != nullptr && rank < segment.size; left += job.widths[rank++]) {
      const int64_t width = job.widths[rank];
      const float* from = rank == segment.rank ? job.part + begin : segment.slot(rank);
      for (int64_t i = begin; i < end(width);) {
        const int64_t column = i % width, num = std::min(width - column, end(width) - i);
        std::memcpy(job.to + i / width * total + left + column, from + i - begin, num * sizeof(float));
        i += num;
      }
    }
  }
}

}  // namespace sluice
