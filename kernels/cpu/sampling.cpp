// The sampler's methods of the module; kernels/cpu/sampling.py documents and checks their arguments.
#include "sampling_methods.h"

#include "choice.h"
#include "masks_call.h"

namespace {

using sluice::Arguments;
using sluice::listed;
using sluice::method;
using sluice::Scoring;

sluice::Sampling sampling(Arguments& arguments) {
  sluice::Sampling by;
  by.temperature = arguments.address<const float>();
  by.top_k = arguments.address<const int64_t>();
  by.top_p = arguments.address<const float>();
  by.min_p = arguments.address<const float>();
  by.typical_p = arguments.address<const float>();
  by.seeds = arguments.address<const int64_t>();
  by.positions = arguments.address<const int64_t>();
  by.outputs = arguments.address<const int64_t>();
  by.ids = arguments.address<int64_t>();
  return by;
}

sluice::Changes changes(Arguments& arguments) {
  sluice::Changes found;
  for (sluice::Masks& masks : found.masks) masks = sluice::masks(arguments);
  found.bans.at = listed(arguments);
  found.bans.ids = arguments.address<const int64_t>();
  found.biases.at = listed(arguments);
  found.biases.ids = arguments.address<const int64_t>();
  found.biases.values = arguments.address<const float>();
  found.penalties.at = listed(arguments);
  found.penalties.firsts = arguments.address<const int64_t>();
  found.penalties.sizes = arguments.address<const int64_t>();
  found.penalties.ids = arguments.address<const int64_t>();
  found.penalties.counts = arguments.address<const float>();
  found.penalties.repetition = arguments.address<const float>();
  found.penalties.presence = arguments.address<const float>();
  found.penalties.frequency = arguments.address<const float>();
  return found;
}

Scoring scoring(Arguments& arguments) {
  Scoring found;
  found.nums = arguments.address<const int64_t>();
  found.width = arguments.integer();
  found.pairs = listed(arguments);
  found.others = arguments.address<const int64_t>();
  found.logprobs = arguments.address<float>();
  found.ranks = arguments.address<int64_t>();
  found.top_ids = arguments.address<int64_t>();
  found.top_logprobs = arguments.address<float>();
  found.other_logprobs = arguments.address<float>();
  found.other_ranks = arguments.address<int64_t>();
  return found;
}

PyObject* choose(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Choice job;
  job.logits = arguments.address<float>();
  job.rows = arguments.integer();
  job.vocab = arguments.integer();
  job.sampling = sampling(arguments);
  job.changes = changes(arguments);
  job.asked = listed(arguments);
  job.scoring = scoring(arguments);
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyObject* score(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Given job;
  job.logits = arguments.address<const float>();
  job.rows = arguments.integer();
  job.vocab = arguments.integer();
  job.ids = arguments.address<const int64_t>();
  job.scoring = scoring(arguments);
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyMethodDef methods[] = {
    method<choose>("choose"),
    method<score>("score"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* sluice::sampling_methods() { return methods; }
