// Linears of any format, told apart when they are called, and rows between them.
#pragma once

#include "integer.h"
#include "pairs.h"
#include "workspace.h"

namespace sluice {

// Of a weight; as in kernels/cpu/native.py. AFFINE: with minima.
enum class Format { FLOAT32, BFLOAT16, INT8, INT8_AFFINE, INT4, INT4_AFFINE };

// A linear of any format.
struct Packed {
  Format format;
  const void* weight;
  const float* bias;
  int64_t inputs, outputs;  // outputs: columns of the weight
  const float* norm;        // [inputs] of the norm before it, or null
};

// Numbers of each token, rows `stride` apart.
struct Rows {
  float* first;
  int64_t stride;

  float* operator[](int64_t token) const { return first + token * stride; }
};

template <typename Weight>
inline void apply_floats(const Packed& layer, Rows x, float eps, const Output& to) {
  run(Linear<Weight>{x.first, x.stride, layer.inputs, static_cast<const Weight*>(layer.weight), eps, layer.norm, to});
}

template <int BITS, bool MINIMA>
inline void apply_integers(const Packed& layer, Rows x, float eps, const Output& to) {
  run(Integer<BITS, MINIMA>{x.first, x.stride, layer.inputs, static_cast<const uint8_t*>(layer.weight), eps, layer.norm,
                            to});
}

// y [m, ..] = or += what `finish` makes of x [m, inputs]; x is normed before if eps is not negative.
inline void apply(const Packed& layer, Rows x, int64_t m, float eps, Finish finish, Rows y, const Added& added = {}) {
  const int64_t n = is_gate(finish) ? layer.outputs / 2 : layer.outputs;
  const Output to{layer.bias, y.first, y.stride, m, n, finish, added};
  switch (layer.format) {
    case Format::FLOAT32: return apply_floats<float>(layer, x, eps, to);
    case Format::BFLOAT16: return apply_floats<uint16_t>(layer, x, eps, to);
    case Format::INT8: return apply_integers<8, false>(layer, x, eps, to);
    case Format::INT8_AFFINE: return apply_integers<8, true>(layer, x, eps, to);
    case Format::INT4: return apply_integers<4, false>(layer, x, eps, to);
    case Format::INT4_AFFINE: return apply_integers<4, true>(layer, x, eps, to);
  }
}

// A buffer for rows of several kinds of so many tokens, and where each kind lies in it.
template <int KINDS>
inline std::array<Rows, KINDS> rows_of(int64_t tokens, const std::array<int64_t, KINDS>& widths) {
  static thread_local Workspace<float> workspace;
  int64_t all = 0;
  for (const int64_t width : widths) all += tokens * row_stride(width);
  float* first = workspace.fit(all);
  std::array<Rows, KINDS> found;
  for (int kind = 0; kind < KINDS; ++kind) {
    found[kind] = {first, row_stride(widths[kind])};
    first += tokens * found[kind].stride;
  }
  return found;
}

}  // namespace sluice
