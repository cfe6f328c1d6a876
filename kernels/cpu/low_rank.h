// Low-rank products beside packed linears: y += scale · B · (A · x), for the rows of a step that have an adapter.
//
// A and B are read in the format of their file, and computed with in float32. Each number of A · x is the sum of LANES
// sums over ascending inputs, each number of the product one chain over ascending ranks: a row's bits depend on nothing
// but the row and its adapter. Layout: A [rank][inputs]; B [OUTPUTS outputs' block][rank][output], the last block as
// narrow as what is left.
#pragma once

#include <vector>

#include "packed.h"

namespace sluice {

constexpr int64_t OUTPUTS = 64;  // of a block of B; as in kernels/formats/side_products.py
constexpr int OUTPUT_VECS = OUTPUTS / LANES;
constexpr int64_t ROWS_A_SLICE = 32;    // of a product that one thread computes at a time
constexpr int64_t BLOCKS_A_SLICE = 16;  // of B

struct Float16 {
  uint16_t bits;
};

inline Vec load(const Float16* from) { return load_half(reinterpret_cast<const uint8_t*>(from)); }

// Has what comes next brought into the cache: the matrices of a side lie one behind the other, in the order of use.
template <typename Element>
inline void fetch(const Element* from) {
  __builtin_prefetch(from);
}

// Of A and B; as in kernels/cpu/low_rank.py.
enum class Stored : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// The product of one projection, which is part of a linear. These structs are int64 and float64 numbers side by side,
// as kernels/cpu/low_rank.py writes them.
struct LowRank {
  const void *a, *b;
  Stored a_format, b_format;
  int64_t rank, first, outputs;  // first: output of the linear, in the order of its rows
  double scale;
};

// What an adapter adds to one linear.
struct Side {
  const float* norm;  // [inputs] or null: weights of a norm that are folded into the linear's
  int64_t num;        // 0: it adds nothing
  LowRank parts[3];
};

// The linears of a layer.
enum class Linears { QKV, OUTPUT, GATE_UP, DOWN };

struct AdapterRows {
  const int64_t* rows;  // [num], ascending
  int64_t num;
  const Side (*layers)[4];  // by layer and linear
};

// The adapters of a step's rows; no row has two.
struct StepAdapters {
  int64_t num;
  AdapterRows each[1];
};

// The adapters beside one layer, and which tokens are left in it.
struct Beside {
  const StepAdapters* step;  // null: none
  int64_t layer;
  const int64_t* kept;  // [num_kept], ascending: the step's tokens whose rows are left; null: all
  int64_t num_kept;

  const Side& side(const AdapterRows& group, Linears linear) const {
    return group.layers[layer][static_cast<int>(linear)];
  }

  bool has(Linears linear) const {
    for (int64_t i = 0; step != nullptr && i < step->num; ++i)
      if (side(step->each[i], linear).num > 0) return true;
    return false;
  }

  // Where the row of a token lies, or -1 if it is not left.
  int64_t place(int64_t token) const {
    if (kept == nullptr) return token;
    const int64_t* found = std::lower_bound(kept, kept + num_kept, token);
    return found < kept + num_kept && *found == token ? found - kept : -1;
  }
};

// A linear's input and where its products are added; `gated`: y lies in panels, as a gated weight of `outputs` rows.
struct Beneath {
  Rows x;
  int64_t inputs, outputs;
  float eps;          // negative: none; else rows of x are divided by their root mean square
  const float* norm;  // [inputs] or null: and multiplied by this
  Rows y;
  bool gated;

  // The column of y that belongs to an output.
  int64_t column(int64_t output) const {
    if (!gated) return output;
    const bool is_gate = output < outputs / 2;
    const auto gate = static_cast<uint64_t>(is_gate ? output : output - outputs / 2);
    return static_cast<int64_t>(gate / GATES * PANEL + gate % GATES) + (is_gate ? 0 : GATES);
  }
};

// A part's product for `rows` of those gathered.
struct LowRankJob {
  const LowRank* part;
  int64_t first, rows, column;  // column: of the part's numbers A · x
};

// So much of a job as one thread computes: ranks or blocks [begin, end), for rows [first, last) of those gathered.
struct Slice {
  const LowRankJob* job;
  int64_t first, last, begin, end;
};

// The rows of a step that an adapter's product is added to.
struct Gathered {
  std::vector<int64_t> places;      // in y
  std::vector<const float*> norms;  // of their sides
  std::vector<LowRankJob> jobs;
  std::vector<Slice> slices;
  Workspace<float> x_room, low_room;
  int64_t width, stride;
  float *x, *low;  // [rows, width], and A · x, scaled [rows, stride]

  int64_t rows() const { return static_cast<int64_t>(places.size()); }
};

inline int64_t whole(int64_t num, int64_t of) { return (num + of - 1) / of * of; }

inline void gather(const Beside& beside, Linears linear, const Beneath& at, Gathered& to) {
  to.places.clear(), to.norms.clear(), to.jobs.clear();
  to.stride = LANES, to.width = whole(at.inputs, LANES);
  for (int64_t i = 0; i < beside.step->num; ++i) {
    const AdapterRows& group = beside.step->each[i];
    const Side& side = beside.side(group, linear);
    const int64_t first = to.rows();
    for (int64_t row = 0; side.num > 0 && row < group.num; ++row)
      if (const int64_t place = beside.place(group.rows[row]); place >= 0)
        to.places.push_back(place), to.norms.push_back(side.norm);
    const int64_t rows = to.rows() - first;
    int64_t column = 0;
    for (int64_t part = 0; rows > 0 && part < side.num; ++part) {
      to.jobs.push_back({&side.parts[part], first, rows, column});
      column += whole(side.parts[part].rank, LANES);
    }
    to.stride = std::max(to.stride, column);
  }
  to.x = to.x_room.fit(to.rows() * to.width), to.low = to.low_room.fit(to.rows() * to.stride);
}

// A row of x, normed as its linear and its side say, and zeros up to whole vectors.
inline void gather_row(const Beneath& at, const Gathered& to, int64_t row) {
  const float* x = at.x[to.places[row]];
  float* copy = to.x + row * to.width;
  const float scale = at.eps < 0.0f ? 1.0f : norm_scale(x, at.inputs, at.eps);
  for (int64_t i = 0; i < at.inputs; ++i) copy[i] = x[i] * scale;
  for (const float* norm : {at.norm, to.norms[row]})
    for (int64_t i = 0; norm != nullptr && i < at.inputs; ++i) copy[i] *= norm[i];
  std::fill(copy + at.inputs, copy + to.width, 0.0f);
}

// Calls work(slice) for slices of all jobs, on several threads if that pays. `size` returns what a part is cut along,
// into pieces of `each`.
template <typename Size, typename Work>
inline void each_slice(Gathered& to, int64_t each, const Size& size, const Work& work) {
  int64_t all = 0;
  to.slices.clear();
  for (const LowRankJob& job : to.jobs) {
    all += job.rows * job.part->rank * std::max(job.part->outputs, to.width);
    for (int64_t first = job.first; first < job.first + job.rows; first += ROWS_A_SLICE)
      for (int64_t begin = 0; begin < size(*job.part); begin += each)
        to.slices.push_back({&job, first, std::min(first + ROWS_A_SLICE, job.first + job.rows), begin,
                             std::min(begin + each, size(*job.part))});
  }
  const auto num = static_cast<int>(to.slices.size());
  if (all > SMALL) return Pool::instance().run(num, [&](int64_t i) { work(to.slices[i]); });
  for (const Slice& slice : to.slices) work(slice);
}

// The last numbers of a row, and zeros.
template <typename Element>
inline Vec load_part(const Element* from, int64_t num) {
  Element part[LANES]{};
  std::memcpy(part, from, num * sizeof(Element));
  return load(part);
}

// A · x of ROWS rows by LANES / ROWS ranks, scaled. Behind the last row or rank the last one is computed once more.
template <int ROWS, typename Element>
inline void shrink_tile(const Slice& slice, const Gathered& to, int64_t inputs, int64_t row, int64_t rank) {
  constexpr int RANKS = LANES / ROWS;
  const LowRank& part = *slice.job->part;
  const Element* a[RANKS];
  const float* x[ROWS];
  for (int i = 0; i < RANKS; ++i)
    a[i] = static_cast<const Element*>(part.a) + std::min(rank + i, part.rank - 1) * inputs;
  for (int r = 0; r < ROWS; ++r) x[r] = to.x + std::min(row + r, slice.last - 1) * to.width;
  Vec acc[LANES]{};
  const auto add = [&](int64_t k, const auto& load_a) {
    Vec own[ROWS];
    for (int r = 0; r < ROWS; ++r) own[r] = load(x[r] + k);
    for (int i = 0; i < RANKS; ++i) {
      const Vec weight = load_a(a[i] + k);
      fetch(a[i] + k + RANKS * inputs);
      for (int r = 0; r < ROWS; ++r) acc[r * RANKS + i] += own[r] * weight;
    }
  };
  int64_t k = 0;
  for (; k + LANES <= inputs; k += LANES) add(k, [](const Element* from) { return load(from); });
  if (k < inputs) add(k, [&](const Element* from) { return load_part(from, inputs - k); });
  float each[LANES];
  store(each, sums(acc) * static_cast<float>(part.scale));
  for (int64_t r = 0; r < std::min<int64_t>(ROWS, slice.last - row); ++r)
    for (int64_t i = 0; i < std::min<int64_t>(RANKS, part.rank - rank); ++i)
      to.low[(row + r) * to.stride + slice.job->column + rank + i] = each[r * RANKS + i];
}

template <typename Element>
inline void shrink(const Slice& slice, const Gathered& to, int64_t inputs) {
  constexpr int ROWS = 4;
  if (slice.last - slice.first == 1) return shrink_tile<1, Element>(slice, to, inputs, slice.first, slice.begin);
  for (int64_t rank = slice.begin; rank < slice.end; rank += LANES / ROWS)
    for (int64_t row = slice.first; row < slice.last; row += ROWS)
      shrink_tile<ROWS, Element>(slice, to, inputs, row, rank);
}

// Adds sums of `num` outputs, LANES at most, to a row of y.
inline void add_sums(const Beneath& at, float* y, int64_t first, int64_t num, Vec sums) {
  const int64_t column = at.column(first);
  if (num == LANES && (!at.gated || at.column(first + LANES - 1) == column + LANES - 1))
    return store(y + column, load(y + column) + sums);
  float each[LANES];
  store(each, sums);
  for (int64_t i = 0; i < num; ++i) y[at.column(first + i)] += each[i];
}

// Adds ROWS rows' products of one block that is whole.
template <int ROWS, typename Element>
inline void expand_block(const Beneath& at, const Slice& slice, const Gathered& to, int64_t row, int64_t block) {
  const LowRank& part = *slice.job->part;
  const Element* b = static_cast<const Element*>(part.b) + block * OUTPUTS * part.rank;
  const float* low = to.low + row * to.stride + slice.job->column;
  Vec acc[ROWS][OUTPUT_VECS]{};
  for (int64_t rank = 0; rank < part.rank; ++rank) {
    Vec weights[OUTPUT_VECS];
    for (int v = 0; v < OUTPUT_VECS; ++v) weights[v] = load(b + rank * OUTPUTS + v * LANES);
    for (int64_t at = 0; at < OUTPUTS; at += LINE / sizeof(Element)) fetch(b + (part.rank + rank) * OUTPUTS + at);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < OUTPUT_VECS; ++v) acc[r][v] += broadcast(low[r * to.stride + rank]) * weights[v];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < OUTPUT_VECS; ++v)
      add_sums(at, at.y[to.places[row + r]], part.first + block * OUTPUTS + v * LANES, LANES, acc[r][v]);
}

// Adds a row's product of the last block, which is narrower.
template <typename Element>
inline void expand_rest(const Beneath& at, const Slice& slice, const Gathered& to, int64_t row, int64_t block) {
  const LowRank& part = *slice.job->part;
  const int64_t first = block * OUTPUTS, outputs = part.outputs - first;
  const Element* b = static_cast<const Element*>(part.b) + first * part.rank;
  const float* low = to.low + row * to.stride + slice.job->column;
  for (int64_t i = 0; i < outputs; i += LANES) {
    const int64_t num = std::min<int64_t>(LANES, outputs - i);
    Vec acc{};
    for (int64_t rank = 0; rank < part.rank; ++rank)
      acc += broadcast(low[rank]) * load_part(b + rank * outputs + i, num);
    add_sums(at, at.y[to.places[row]], part.first + first + i, num, acc);
  }
}

template <typename Element>
inline void expand(const Beneath& at, const Slice& slice, const Gathered& to) {
  constexpr int ROWS = LANES == 16 ? 4 : 1;  // that have room in the registers
  for (int64_t block = slice.begin; block < slice.end; ++block) {
    const bool is_whole = (block + 1) * OUTPUTS <= slice.job->part->outputs;
    int64_t row = slice.first;
    for (; is_whole && row + ROWS <= slice.last; row += ROWS) expand_block<ROWS, Element>(at, slice, to, row, block);
    for (; row < slice.last; ++row)
      if (is_whole) expand_block<1, Element>(at, slice, to, row, block);
      else expand_rest<Element>(at, slice, to, row, block);
  }
}

// Calls work with a value of the type that numbers are stored in.
template <typename Work>
inline void with_stored(Stored format, const Work& work) {
  switch (format) {
    case Stored::FLOAT32: return work(float{});
    case Stored::BFLOAT16: return work(uint16_t{});
    case Stored::FLOAT16: return work(Float16{});
  }
}

// Adds the products of a layer's adapters to what one of its linears has computed.
inline void add_beside(const Beside& beside, Linears linear, const Beneath& at) {
  static thread_local Gathered gathered;
  Gathered& to = gathered;  // not another thread's
  if (!beside.has(linear)) return;
  gather(beside, linear, at, to);
  each_row(to.rows(), at.inputs, [&](int64_t row) { gather_row(at, to, row); });
  const auto ranks = [](const LowRank& part) { return part.rank; };
  each_slice(to, LANES, ranks, [&](const Slice& slice) {
    with_stored(slice.job->part->a_format, [&](auto one) { shrink<decltype(one)>(slice, to, at.inputs); });
  });
  const auto blocks = [](const LowRank& part) { return whole(part.outputs, OUTPUTS) / OUTPUTS; };
  each_slice(to, BLOCKS_A_SLICE, blocks, [&](const Slice& slice) {
    with_stored(slice.job->part->b_format, [&](auto one) { expand<decltype(one)>(at, slice, to); });
  });
}

// y [m, ..] = gate(linear(x)), as `apply` computes it, with the products of adapters added before the gate.
inline void apply_gated(const Packed& layer, Rows x, int64_t m, float eps, Finish gate, Rows y, const Beside& beside) {
  static thread_local Workspace<float> workspace;
  const int64_t n = layer.outputs / 2, width = num_panels(n, true) * PANEL;
  Packed plain = layer;
  plain.bias = nullptr, plain.outputs = width;  // the bias is in the order of rows, and halves are in that of panels
  const Rows halves{workspace.fit(m * row_stride(width)), row_stride(width)};
  apply(plain, x, m, eps, Finish::STORE, halves);
  add_beside(beside, Linears::GATE_UP, {x, layer.inputs, layer.outputs, eps, layer.norm, halves, true});
  const Output to{layer.bias, y.first, y.stride, m, n, gate};
  each_row(m, width, [&](int64_t row) {
    for (int64_t panel = 0; panel < width / PANEL; ++panel)
      finish_gates(to, row, panel, load_sums(halves[row] + panel * PANEL), 1.0f);
  });
}

// Products of one side for all rows of x, added to y.
struct SideJob {
  const Side* side;
  int64_t tokens;
  Beneath at;
};

inline void run(SideJob& job) {
  std::vector<int64_t> rows(job.tokens);
  for (int64_t row = 0; row < job.tokens; ++row) rows[row] = row;
  Side layer[1][4]{*job.side};
  const StepAdapters step{1, {{rows.data(), job.tokens, layer}}};
  add_beside({&step, 0, nullptr, 0}, Linears::QKV, job.at);
}

}  // namespace sluice
