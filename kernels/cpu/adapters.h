// The adapters of a step: which rows have which, and where the matrices are that they add products of.
//
// These structs are int64 and float64 numbers side by side, as kernels/cpu/low_rank.py writes them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sluice {

// Of A and B; as in kernels/cpu/low_rank.py.
enum class Stored : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// The product of one projection, which is part of a linear.
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
  const int64_t* inputs;  // [4], of the layer's linears
  bool goes_on;           // to the next layer, which is like this one

  const Side& side(const AdapterRows& group, Linears linear) const {
    return group.layers[layer][static_cast<int>(linear)];
  }

  // What an adapter adds to the linear that is computed behind one, or null.
  const Side* behind(const AdapterRows& group, Linears linear) const {
    if (linear != Linears::DOWN) return &group.layers[layer][static_cast<int>(linear) + 1];
    return goes_on ? &group.layers[layer + 1][static_cast<int>(Linears::QKV)] : nullptr;
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

}  // namespace sluice
