// Decoder layers as calls from Python: one layer, or several that nothing interrupts.
//
// What a layer is stays from step to step, and so does where its keys and values lie; a call for several layers reads
// both from tables that Python keeps (engine/models/layers/runs.py). What a step is made of comes with each call.
#pragma once

#include <vector>

#include "call.h"
#include "layer.h"
#include "packed_call.h"
#include "segment_call.h"

namespace sluice {

template <typename Element, typename From>
Cache<Element> cache(From& from) {
  Cache<Element> found;
  found.first = from.template address<Element>();
  found.block_size = from.integer();
  found.block = from.integer();
  found.token = from.integer();
  found.half = from.integer();
  found.head = from.integer();
  return found;
}

template <typename Element>
void rows(Arguments& arguments, Attention<Element>& job) {
  job.tables = arguments.address<const int32_t>();
  job.table_width = arguments.integer();
  job.firsts = arguments.address<const int64_t>();
  job.counts = arguments.address<const int64_t>();
  job.contexts = arguments.address<const int64_t>();
  job.rows = arguments.integer();
  job.positions = arguments.address<const int64_t>();
  job.paths = arguments.address<const int32_t>();
  job.path_begins = arguments.address<const int64_t>();
  job.prefixes.rows = arguments.address<const int64_t>();
  job.prefixes.ends = arguments.address<const int64_t>();
  job.prefixes.lengths = arguments.address<const int64_t>();
  job.prefixes.num = arguments.integer();
}

// What a layer is, whatever the step.
template <typename Element, typename From>
void parts(From& from, Layer<Element>& job) {
  job.qkv = packed(from);
  job.output = packed(from);
  job.gate_up = packed(from);
  job.down = packed(from);
  job.gate = static_cast<Finish>(from.integer());
  job.router = from.template address<const Router>();
  job.output_norm = from.template address<const float>();
  job.down_norm = from.template address<const float>();
  RotateAndWrite<Element>& write = job.write;
  Attention<Element>& attention = job.attention;
  write.norms = from.template address<const float>();
  write.eps = job.eps = from.real();
  write.num_heads = attention.heads = from.integer();
  write.kv_heads = attention.kv_heads = from.integer();
  write.dim = attention.dim = from.integer();
  attention.window = from.integer();
  attention.scale = from.real();
  attention.cap = from.real();
}

template <typename Element>
PyObject* layer(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Layer<Element> job;
  parts(arguments, job);
  RotateAndWrite<Element>& write = job.write;
  Attention<Element>& attention = job.attention;
  job.h = arguments.address<float>();
  write.cis = arguments.address<const float>();
  write.tokens = arguments.integer();
  write.slots = arguments.address<const int64_t>();
  write.cache = attention.cache = cache<Element>(arguments);
  rows(arguments, attention);
  job.kept = arguments.address<const int64_t>();
  job.num_kept = arguments.integer();
  job.adapters = arguments.address<const StepAdapters>();
  job.index = arguments.integer();
  attention.ends = arguments.optional<const int64_t>();
  return arguments.ok() ? compute(job) : nullptr;
}

// Where the tokens of a step are written and what they see, for all layers with the same block tables.
template <typename Element>
struct StepTokens {
  const int64_t* slots;
  Attention<Element> seen;  // its rows
};

// Consecutive layers of one step.
template <typename Element>
struct Layers {
  const double* table;  // [num, width]: of each layer its rotation, its group of tokens, its cache, and its `parts`
  int64_t width, num;
  float* h;
  int64_t tokens;
  const int64_t* kept;  // behind the last of the layers; see Layer
  int64_t num_kept;
  const StepAdapters* adapters;
  int64_t first;                        // index of the first layer in `adapters`
  std::vector<const float*> rotations;  // by table
  std::vector<StepTokens<Element>> groups;
  LayerSums* sums = nullptr;  // of ranks that share out the layers; each row of `table` ends with its shards then
};

template <typename Element>
void run(const Layers<Element>& all) {
  for (int64_t at = 0; at < all.num; ++at) {
    Numbers numbers(all.table + at * all.width);
    Layer<Element> job;
    job.write.cis = all.rotations[numbers.integer()];
    const StepTokens<Element>& tokens = all.groups[numbers.integer()];
    job.attention = tokens.seen;
    job.write.tokens = all.tokens, job.write.slots = tokens.slots;
    job.write.cache = job.attention.cache = cache<Element>(numbers);
    parts(numbers, job);
    const bool is_last = at + 1 == all.num;
    job.h = all.h;
    job.kept = all.kept, job.num_kept = is_last ? all.num_kept : ALL_TOKENS;
    job.adapters = all.adapters, job.index = all.first + at, job.goes_on = !is_last;
    if (all.sums != nullptr) job.shards = numbers.address<const LayerShards>(), job.sums = all.sums;
    run(job);
    if (all.sums != nullptr && !all.sums->are_well()) return;
  }
}

template <typename Element>
void layers_of(Arguments& arguments, Layers<Element>& job) {
  job.table = arguments.address<const double>();
  job.width = arguments.integer();
  job.num = arguments.integer();
  job.h = arguments.address<float>();
  job.tokens = arguments.integer();
  job.kept = arguments.address<const int64_t>();
  job.num_kept = arguments.integer();
  job.adapters = arguments.address<const StepAdapters>();
  job.first = arguments.integer();
  for (int64_t left = arguments.integer(); left > 0; --left) job.rotations.push_back(arguments.address<const float>());
  for (int64_t left = arguments.integer(); left > 0; --left) {
    StepTokens<Element>& group = job.groups.emplace_back();
    group.slots = arguments.address<const int64_t>();
    rows(arguments, group.seen);
    group.seen.ends = arguments.address<const int64_t>();
  }
}

template <typename Element>
PyObject* layers(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Layers<Element> job;
  layers_of(arguments, job);
  return arguments.ok() ? compute(job) : nullptr;
}

// Of a rank among others: returns what went wrong in a sum, as kernels/cpu/sums.py says, then the number of the next
// sum and the seconds that sums took.
template <typename Element>
PyObject* shared_layers(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  LayerSums sums{segment(arguments)};
  Layers<Element> job;
  layers_of(arguments, job);
  job.sums = &sums;
  if (!arguments.ok()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  run(job);
  tell(sums.segment, sums.outcome);
  Py_END_ALLOW_THREADS;
  const Outcome& found = sums.outcome;
  return Py_BuildValue("LLLd", static_cast<long long>(found.fault), static_cast<long long>(found.rank),
                       static_cast<long long>(sums.segment.number), sums.seconds);
}

}  // namespace sluice
