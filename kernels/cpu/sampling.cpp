// The sampler as a Python module of its own; kernels/native_sampling.py says what its arguments mean and checks them.
#include "call.h"

#include "adjust.h"
#include "sampling.h"
#include "scores.h"

namespace {

using sluice::Arguments;
using sluice::Sampling;

PyObject* sample(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Sampling job;
  job.logits = arguments.address<const float>();
  job.rows = arguments.integer();
  job.vocab = arguments.integer();
  job.temperature = arguments.address<const float>();
  job.top_k = arguments.address<const int64_t>();
  job.top_p = arguments.address<const float>();
  job.min_p = arguments.address<const float>();
  job.typical_p = arguments.address<const float>();
  job.seeds = arguments.address<const int64_t>();
  job.positions = arguments.address<const int64_t>();
  job.outputs = arguments.address<const int64_t>();
  job.ids = arguments.address<int64_t>();
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyObject* score(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Scoring job;
  job.logits = arguments.address<const float>();
  job.rows = arguments.integer();
  job.vocab = arguments.integer();
  job.ids = arguments.address<const int64_t>();
  job.nums = arguments.address<const int64_t>();
  job.width = arguments.integer();
  job.other_rows = arguments.address<const int64_t>();
  job.others = arguments.address<const int64_t>();
  job.pairs = arguments.integer();
  job.logprobs = arguments.address<float>();
  job.ranks = arguments.address<int64_t>();
  job.top_ids = arguments.address<int64_t>();
  job.top_logprobs = arguments.address<float>();
  job.other_logprobs = arguments.address<float>();
  job.other_ranks = arguments.address<int64_t>();
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyObject* mask(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Masking job;
  job.logits = arguments.address<float>();
  job.vocab = arguments.integer();
  job.rows = arguments.address<const int64_t>();
  job.bits = arguments.address<const uint32_t>();
  job.num = arguments.integer();
  job.words = arguments.integer();
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyObject* bar(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Barring job;
  job.logits = arguments.address<float>();
  job.vocab = arguments.integer();
  job.rows = arguments.address<const int64_t>();
  job.ids = arguments.address<const int64_t>();
  job.num = arguments.integer();
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyObject* add(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Biasing job;
  job.logits = arguments.address<float>();
  job.vocab = arguments.integer();
  job.rows = arguments.address<const int64_t>();
  job.ids = arguments.address<const int64_t>();
  job.values = arguments.address<const float>();
  job.num = arguments.integer();
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyObject* penalise(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Penalising job;
  job.logits = arguments.address<float>();
  job.vocab = arguments.integer();
  job.rows = arguments.address<const int64_t>();
  job.sizes = arguments.address<const int64_t>();
  job.ids = arguments.address<const int64_t>();
  job.counts = arguments.address<const float>();
  job.repetition = arguments.address<const float>();
  job.presence = arguments.address<const float>();
  job.frequency = arguments.address<const float>();
  job.num = arguments.integer();
  return arguments.ok() ? sluice::compute(job) : nullptr;
}

PyMethodDef methods[] = {
    sluice::method<sample>("sample"),
    sluice::method<score>("score"),
    sluice::method<mask>("mask"),
    sluice::method<bar>("bar"),
    sluice::method<add>("add"),
    sluice::method<penalise>("penalise"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = NAME(SLUICE_MODULE), .m_doc = nullptr, .m_size = 0, .m_methods = methods,
    .m_slots = nullptr, .m_traverse = nullptr, .m_clear = nullptr, .m_free = nullptr,
};

}  // namespace

PyMODINIT_FUNC INIT(SLUICE_MODULE)() { return PyModule_Create(&definition); }
