// Low-rank products beside packed linears: y += scale · B · (A · x), for the rows of a step that have an adapter.
//
// They are computed before the linear's own products, which they are added to where those are finished. A row's bits
// depend on nothing but the row, its adapter and the format of the linear.
#pragma once

#include <vector>

#include "low_rank_expand.h"
#include "low_rank_shrink.h"

namespace sluice {

constexpr int64_t RANKS_A_SLICE = 64;  // of A · x
constexpr int64_t ROWS_A_SLICE = 32;   // of B · (A · x)

// So many panels of B · (A · x) as one thread computes for rows [first, last) of a group.
struct PanelSlice {
  const SideRows* group;
  int64_t first, last, begin, end;
};

// Products of one linear for the rows that have an adapter.
class Products {
 public:
  bool gather(const Beside& beside, Linears linear);
  void shrink(const Beneath& at);
  Added expand(int64_t rows, int64_t outputs, bool gated);
  void note_later(const Beside& beside, Linears linear, Added& to);

 private:
  template <typename Work>
  void each_run(const Side& side, int64_t begin, int64_t end, const Work& work) const;
  void expand_slice(const PanelSlice& slice);

  std::vector<int64_t> places_;  // in y, of each adapter's rows
  std::vector<SideRows> groups_;
  std::vector<Slice> slices_;
  std::vector<PanelSlice> panels_;
  std::vector<const float*> addends_;  // by row of y; see panels.h
  std::vector<Lines> later_;           // matrices beside the next linear
  Workspace<float> low_room_, room_;
  float* low_ = nullptr;   // A · x, scaled: [rows, stride], two of bfloat16 in the place of two float32
  float* into_ = nullptr;  // [rows, width]
  int64_t stride_ = 0, width_ = 0, outputs_ = 0;
  bool rounds_ = false, gated_ = false;
};

// Returns whether any row has a product.
inline bool Products::gather(const Beside& beside, Linears linear) {
  places_.clear(), groups_.clear();
  stride_ = LANES;
  for (int64_t i = 0; i < beside.step->num; ++i) {
    const AdapterRows& group = beside.step->each[i];
    const Side& side = beside.side(group, linear);
    const auto first = static_cast<int64_t>(places_.size());
    for (int64_t row = 0; side.num > 0 && row < group.num; ++row)
      if (const int64_t place = beside.place(group.rows[row]); place >= 0) places_.push_back(place);
    const auto last = static_cast<int64_t>(places_.size());
    if (first < last) groups_.push_back({&side, first, last});
    stride_ = std::max(stride_, each_part(side, [](const LowRank&, int64_t) {}));
  }
  return !groups_.empty();
}

inline void Products::shrink(const Beneath& at) {
  int64_t all = 0;
  slices_.clear(), rounds_ = at.rounds;
  low_ = low_room_.fit(static_cast<int64_t>(places_.size()) * stride_);
  for (const SideRows& group : groups_) {
    const int64_t ranks = each_part(*group.side, [](const LowRank&, int64_t) {});
    all += (group.last - group.first) * ranks * at.inputs;
    for (int64_t first = group.first; first < group.last; first += SHRINK_ROWS)
      for (int64_t begin = 0; begin < ranks; begin += RANKS_A_SLICE)
        slices_.push_back({&group, first, std::min(first + SHRINK_ROWS, group.last), begin, begin + RANKS_A_SLICE});
  }
  const auto work = [&](int64_t i) { shrink_slice(at, slices_[i], places_.data(), low_, stride_); };
  const auto num = static_cast<int>(slices_.size());
  if (all > SMALL) return Pool::instance().run(num, work);
  for (int i = 0; i < num; ++i) work(i);
}

// Calls work(part, column in a row of A · x, outputs [first, end) of the part, packed column) for what one side adds to
// panels [begin, end), in the order of B. Gated, a call has outputs of several panels only where each GATES of the part
// are of one panel.
template <typename Work>
inline void Products::each_run(const Side& side, int64_t begin, int64_t end, const Work& work) const {
  const int64_t half = outputs_ / 2, width = gated_ ? GATES : PANEL, limit = gated_ ? half : outputs_;
  each_part(side, [&](const LowRank& part, int64_t low) {
    for (int64_t run = 0; run < (gated_ ? 2 : 1); ++run) {
      const int64_t shift = run * half - part.first;  // from an output's place in the run to that in the part
      const int64_t panels = gated_ && shift % GATES != 0 ? 1 : end - begin;
      for (int64_t panel = begin; panel < end; panel += panels) {
        const int64_t first = std::max<int64_t>(0, shift + panel * width), from = first - shift;
        const int64_t last = std::min(part.outputs, shift + std::min(limit, (panel + panels) * width));
        const int64_t column = gated_ ? from / GATES * PANEL + run * GATES + from % GATES : from;
        if (first < last) work(part, low, first, last, column);
      }
    }
  });
}

inline void Products::expand_slice(const PanelSlice& slice) {
  const float* low = low_ + slice.first * stride_;
  float* to = into_ + slice.first * width_;
  const int64_t rows = slice.last - slice.first;
  const int64_t gap = gated_ ? PANEL - GATES : 0;
  int64_t covered = 0;
  each_part(*slice.group->side, [&](const LowRank& part, int64_t) { covered += part.outputs; });
  for (int64_t row = 0; covered < outputs_ && row < rows; ++row)  // adding -0 changes nothing
    std::fill(to + row * width_ + slice.begin * PANEL, to + row * width_ + slice.end * PANEL, -0.0f);
  each_run(*slice.group->side, slice.begin, slice.end,
           [&](const LowRank& part, int64_t at, int64_t first, int64_t last, int64_t column) {
             with_kind(part.b_format, rounds_, [&](auto kind) {
               expand_outputs<decltype(kind)>(part, first, last, {rows, low + at, stride_, to + column, width_, gap});
             });
           });
}

// Returns what is added to so many rows of y, of a linear of so many outputs; see panels.h.
inline Added Products::expand(int64_t rows, int64_t outputs, bool gated) {
  outputs_ = outputs, gated_ = gated;
  const int64_t panels = panels_of(outputs, gated), num = static_cast<int64_t>(places_.size());
  width_ = row_stride(panels * PANEL);
  into_ = room_.fit(num * width_);
  addends_.assign(rows, nullptr);
  for (int64_t row = 0; row < num; ++row) addends_[places_[row]] = into_ + row * width_;
  int64_t blocks = 0;
  for (const SideRows& group : groups_) blocks += whole(group.last - group.first, ROWS_A_SLICE) / ROWS_A_SLICE;
  const int64_t wanted = RUNS_A_THREAD * Pool::instance().threads();
  const int64_t each = std::clamp<int64_t>(blocks * panels / wanted, 1, panels);
  panels_.clear();
  for (const SideRows& group : groups_)
    for (int64_t first = group.first; first < group.last; first += ROWS_A_SLICE)
      for (int64_t begin = 0; begin < panels; begin += each)
        panels_.push_back(
            {&group, first, std::min(first + ROWS_A_SLICE, group.last), begin, std::min(begin + each, panels)});
  const auto work = [&](int64_t i) { expand_slice(panels_[i]); };
  const auto slices = static_cast<int>(panels_.size());
  if (num * stride_ * outputs > SMALL) Pool::instance().run(slices, work);
  else
    for (int i = 0; i < slices; ++i) work(i);
  return {addends_.data()};
}

// Notes the matrices that adapters have beside the linear that is computed next.
inline void Products::note_later(const Beside& beside, Linears linear, Added& to) {
  const int64_t inputs = beside.inputs[(static_cast<int>(linear) + 1) % 4];
  const auto note = [&](const void* first, int64_t numbers, Stored format) {
    later_.push_back({static_cast<const uint8_t*>(first), whole(numbers * size_of(format), LINE) / LINE});
    to.all_later += later_.back().num;
  };
  later_.clear();
  for (int64_t i = 0; i < beside.step->num; ++i) {
    const Side* side = beside.behind(beside.step->each[i], linear);
    if (side == nullptr) continue;
    each_part(*side, [&](const LowRank& part, int64_t) { note(part.a, part.rank * inputs, part.a_format); });
    each_part(*side, [&](const LowRank& part, int64_t) { note(part.b, part.rank * part.outputs, part.b_format); });
  }
  to.later = later_.data();
}

// Returns what a layer's adapters have beside one of its linears, for so many rows of x. It lasts until the next call
// of this thread.
inline Added products_beside(const Beside& beside, Linears linear, const Packed& layer, Rows x, int64_t rows,
                             float eps) {
  static thread_local Products products;
  if (beside.step == nullptr) return {};
  Added added;
  if (beside.has(linear) && products.gather(beside, linear)) {
    products.shrink({x, layer.inputs, eps, layer.norm, rounds(layer)});
    added = products.expand(rows, layer.outputs, linear == Linears::GATE_UP);
  }
  products.note_later(beside, linear, added);
  return added;
}

// Products of one side for all rows of x [tokens, inputs], added to y [tokens, outputs] as beside a weight of a format.
struct SideJob {
  const Side* side;
  int64_t tokens, inputs, outputs;
  float *x, *y;
  Format format;
};

inline void run(SideJob& job) {
  constexpr float no_norm = -1.0f;
  std::vector<int64_t> rows(job.tokens);
  for (int64_t row = 0; row < job.tokens; ++row) rows[row] = row;
  Side layer[1][4]{*job.side};
  const StepAdapters step{1, {{rows.data(), job.tokens, layer}}};
  const Packed none{job.format, nullptr, nullptr, job.inputs, job.outputs, nullptr};
  const int64_t inputs[4]{};
  const Beside beside{&step, 0, nullptr, 0, inputs, false};
  const Added added = products_beside(beside, Linears::QKV, none, {job.x, job.inputs}, job.tokens, no_norm);
  each_row(added.rows == nullptr ? 0 : job.tokens, job.outputs, [&](int64_t row) {
    for (int64_t i = 0; i < job.outputs; ++i) job.y[row * job.outputs + i] += added.rows[row][i];
  });
}

}  // namespace sluice
