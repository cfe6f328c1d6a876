// A decoder layer as one call: between its operations nothing waits for an interpreter.
//
// What each operation computes is what it computes alone, to the bit: this is their sequence and nothing else.
#pragma once

#include "attention.h"
#include "layer_sums.h"
#include "low_rank.h"

namespace sluice {

// h [k] += x [k] divided by its root mean square, times its weights.
inline void add_normed(const float* x, const float* norm, int64_t k, float eps, float* h) {
  const float scale = norm_scale(x, k, eps);
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) store(h + i, load(h + i) + load(x + i) * scale * load(norm + i));
  for (; i < k; ++i) h[i] += x[i] * scale * norm[i];
}

template <typename Element>
struct Layer {
  Packed qkv, output, gate_up, down;  // with experts, the latter are those of the first
  Finish gate;
  const Router* router;      // of experts, or null
  const float* output_norm;  // [hidden] or null: what is added to h is normed before
  const float* down_norm;
  float eps;
  RotateAndWrite<Element> write;  // its heads are filled in here
  Attention<Element> attention;   // its queries and result likewise
  float* h;                       // [T, hidden], advanced in place
  const int64_t* kept;            // [num_kept], ascending: tokens that are wanted behind the layer; their rows move up
  int64_t num_kept;               // ALL_TOKENS: nothing moves
  const StepAdapters* adapters;   // of the step's tokens, or null
  int64_t index;                  // of this layer in them
  bool goes_on = false;           // whether the next one follows in the same call
  // Where ranks share out the inputs of output and down, this rank's shards of them; both are then those of the first
  // shard, there are no experts and no adapters, and nothing moves. Else null.
  const LayerShards* shards = nullptr;
  LayerSums* sums = nullptr;
};

using Inputs = std::array<int64_t, 4>;  // by linear

template <typename Element>
inline Inputs inputs_of(const Layer<Element>& job) {
  return {job.qkv.inputs, job.output.inputs, job.gate_up.inputs, job.down.inputs};
}

constexpr int64_t ALL_TOKENS = -1;  // as in kernels/cpu/native_layers.py

// A layer's linear whose result joins the residual stream, and the norm that this passes first, or null.
struct Join {
  const Packed& layer;
  Linears linear;
  const float* norm;
  float eps;
};

// h += layer(x) of so many tokens, through a norm if there is one; `between` [T, hidden] is used then.
inline void add(const Join& join, Rows x, Rows between, Rows h, int64_t tokens, const Beside& beside) {
  constexpr float no_norm = -1.0f;
  const auto& [layer, linear, norm, eps] = join;
  const Added added = products_beside(beside, linear, layer, x, tokens, no_norm);
  apply(layer, x, tokens, no_norm, norm == nullptr ? Finish::ADD : Finish::STORE, norm == nullptr ? h : between, added);
  if (norm == nullptr) return;
  each_row(tokens, layer.outputs, [&](int64_t t) { add_normed(between[t], norm, layer.outputs, eps, h[t]); });
}

// Moves the rows of wanted tokens to the front: who asks no more than keys and values of the others gets no more.
template <typename Element>
inline int64_t keep_wanted(const Layer<Element>& job, Rows seen, Rows h) {
  if (job.num_kept == ALL_TOKENS) return job.write.tokens;
  const auto move = [&](Rows rows, int64_t width) {
    for (int64_t i = 0; i < job.num_kept; ++i)
      if (job.kept[i] != i) std::memcpy(rows[i], rows[job.kept[i]], width * sizeof(float));
  };
  move(seen, job.output.inputs);
  move(h, job.output.outputs);
  return job.num_kept;
}

// seen = attention of h; `heads` are used for queries, keys and values.
template <typename Element>
inline void attend(Layer<Element>& job, Rows h, Rows heads, Rows seen) {
  const Inputs inputs = inputs_of(job);
  const Beside all{job.adapters, job.index, nullptr, 0, inputs.data(), job.goes_on};
  const Added added = products_beside(all, Linears::QKV, job.qkv, h, job.write.tokens, job.eps);
  apply(job.qkv, h, job.write.tokens, job.eps, Finish::STORE, heads, added);
  job.write.heads = heads.first, job.write.stride = heads.stride;
  run(job.write);
  job.attention.q = heads.first, job.attention.q_stride = heads.stride;
  job.attention.out = seen.first, job.attention.out_stride = seen.stride;
  run(job.attention);
}

// h += what all ranks make of their inputs x, through a norm if there is one; see `add` and `add_shared`.
inline void add_of_ranks(const Join& join, const Matrix* shards, int64_t num, Rows x, Rows between, Rows h,
                         int64_t tokens, LayerSums& sums) {
  const auto& [layer, linear, norm, eps] = join;
  if (norm == nullptr) return add_shared(layer, shards, num, x, tokens, h.first, sums);
  const Rows total{between.first, layer.outputs};  // row by row without a gap, as sums are
  std::fill_n(total.first, tokens * layer.outputs, 0.0f);
  add_shared(layer, shards, num, x, tokens, total.first, sums);
  if (!sums.are_well()) return;
  each_row(tokens, layer.outputs, [&](int64_t t) { add_normed(total[t], norm, layer.outputs, eps, h[t]); });
}

// The layer of a rank among others. A sum that cannot be completed ends it; `sums` tells.
template <typename Element>
inline void run_shared(Layer<Element>& job) {
  const int64_t tokens = job.write.tokens, num = job.shards->num;
  const bool is_normed = job.output_norm != nullptr || job.down_norm != nullptr;
  const int64_t hidden = job.output.outputs;
  const auto [heads, seen, gated, between] =
      rows_of<4>(tokens, {job.qkv.outputs, num * job.output.inputs, num * job.down.inputs, is_normed ? hidden : 0});
  const Rows h{job.h, hidden};
  const Join output{job.output, Linears::OUTPUT, job.output_norm, job.eps};
  const Join down{job.down, Linears::DOWN, job.down_norm, job.eps};
  attend(job, h, heads, seen);
  add_of_ranks(output, job.shards->output(), num, seen, between, h, tokens, *job.sums);
  if (!job.sums->are_well()) return;
  apply(job.gate_up, h, tokens, job.eps, job.gate, gated);
  add_of_ranks(down, job.shards->down(), num, gated, between, h, tokens, *job.sums);
}

template <typename Element>
inline void run(Layer<Element>& job) {
  if (job.shards != nullptr) return run_shared(job);
  const int64_t tokens = job.write.tokens, hidden = job.output.outputs;
  const bool is_normed = job.output_norm != nullptr || job.down_norm != nullptr;
  const auto [heads, seen, gated, between] =
      rows_of<4>(tokens, {job.qkv.outputs, job.output.inputs, job.down.inputs, is_normed ? hidden : 0});
  const Rows h{job.h, hidden};
  attend(job, h, heads, seen);
  const int64_t wanted = keep_wanted(job, seen, h);
  const int64_t* kept = job.num_kept == ALL_TOKENS ? nullptr : job.kept;
  const Inputs inputs = inputs_of(job);
  const Beside left{job.adapters, job.index, kept, job.num_kept, inputs.data(), job.goes_on};
  add({job.output, Linears::OUTPUT, job.output_norm, job.eps}, seen, between, h, wanted, left);
  if (job.router != nullptr)
    return run(
        Experts{job.gate_up, job.down, job.gate, job.eps, job.router, job.h, job.h, wanted, 0, job.router->experts});
  const Added added = products_beside(left, Linears::GATE_UP, job.gate_up, h, wanted, job.eps);
  apply(job.gate_up, h, wanted, job.eps, job.gate, gated, added);
  add({job.down, Linears::DOWN, job.down_norm, job.eps}, gated, between, h, wanted, left);
}

}  // namespace sluice
