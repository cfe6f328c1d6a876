// A pre-normed layer of an encoder in two calls, each of some rows of one input: what its tokens are seen by, and what
// follows once all of them are known.
//
// A row's bits depend on its input alone, whatever rows are computed with it.
#pragma once

#include "activations.h"
#include "whole_attention.h"

namespace sluice {

struct EncoderLayer {
  Packed qkv, output, up, down;
  RowNorm attention_norm, mlp_norm;
  Activation activation;
  bool is_gated;  // the activation of the first half of `up` is multiplied by the second
};

// Rows of the input whose hidden states are h [num, hidden], one after the other.
struct EncoderRows {
  EncoderLayer layer;
  float* h;
  int64_t first, num;  // the tokens of the input that they are
  WholeHeads heads;
};

// Queries, keys and values of rows.
struct Project {
  EncoderRows of;
  const float* cis;  // [num, dim / 2, 2]: cosine and sine by which the pair (i, i + dim / 2) of a head turns; or null
};

// h += attention, then h += MLP, of rows whose runs of tokens are all projected.
struct Advance {
  EncoderRows of;
  const Run* runs;
  int64_t num_runs;
};

constexpr float NOT_NORMED = -1.0f;

// Turns each head's pairs in place.
inline void turn_heads(const float* cis, float* x, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t head = 0; head < heads; ++head, x += dim)
    for (int64_t i = 0; i < half; ++i) {
      const float cosine = cis[2 * i], sine = cis[2 * i + 1], one = x[i], other = x[i + half];
      x[i] = one * cosine - other * sine;
      x[i + half] = other * cosine + one * sine;
    }
}

// Puts a token's queries, keys and values where attention reads them.
inline void keep_token(const WholeHeads& heads, int64_t token, const float* projected, float scale) {
  const int64_t hidden = heads.hidden(), dim = heads.dim, wide = heads.wide();
  float* query = heads.queries()[token];
  for (int64_t i = 0; i < hidden; ++i) query[i] = projected[i] * scale;
  for (int64_t head = 0; head < heads.heads; ++head) {
    const float *key = projected + hidden + head * dim, *value = key + hidden;
    float* keys = heads.keys(head, token / KEY_PANEL) + token % KEY_PANEL;
    for (int64_t i = 0; i < dim; ++i) keys[i * KEY_PANEL] = key[i];
    float* values = heads.values(head) + token * wide;
    std::copy(value, value + dim, values);
    std::fill(values + dim, values + wide, 0.0f);
  }
}

inline void run(const Project& job) {
  const auto& [layer, h, first, num, heads] = job.of;
  const int64_t hidden = heads.hidden(), dim = heads.dim;
  const auto [normed, projected] = rows_of<2>(num, {hidden, 3 * hidden});
  each_row(num, hidden, [&](int64_t row) { norm_row(layer.attention_norm, h + row * hidden, hidden, normed[row]); });
  apply(layer.qkv, normed, num, NOT_NORMED, Finish::STORE, projected);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  each_row(num, hidden, [&](int64_t row) {
    if (job.cis != nullptr) turn_heads(job.cis + row * dim, projected[row], 2 * heads.heads, dim);
    keep_token(heads, first + row, projected[row], scale);
  });
}

inline void activate_row(const EncoderLayer& layer, float* up) {
  const int64_t inner = layer.down.inputs;
  activate(layer.activation, up, inner);
  for (int64_t i = 0; layer.is_gated && i < inner; ++i) up[i] *= up[inner + i];
}

inline void run(const Advance& job) {
  const auto& [layer, h, first, num, heads] = job.of;
  const int64_t hidden = heads.hidden();
  const auto [rows, up] = rows_of<2>(num, {hidden, layer.up.outputs});
  const Rows states{h, hidden};
  attend_whole(heads, job.runs, job.num_runs, rows);
  apply(layer.output, rows, num, NOT_NORMED, Finish::ADD, states);
  each_row(num, hidden, [&](int64_t row) { norm_row(layer.mlp_norm, states[row], hidden, rows[row]); });
  apply(layer.up, rows, num, NOT_NORMED, Finish::STORE, up);
  each_row(num, layer.up.outputs, [&](int64_t row) { activate_row(layer, up[row]); });
  apply(layer.down, up, num, NOT_NORMED, Finish::ADD, states);
}

}  // namespace sluice
