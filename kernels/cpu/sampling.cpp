// The sampler as a Python module of its own; kernels/native.py says what its arguments mean and checks them.
#include "call.h"

#include "sampling.h"

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

PyMethodDef methods[] = {
    sluice::method<sample>("sample"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = NAME(SLUICE_MODULE), .m_doc = nullptr, .m_size = 0, .m_methods = methods,
    .m_slots = nullptr, .m_traverse = nullptr, .m_clear = nullptr, .m_free = nullptr,
};

}  // namespace

PyMODINIT_FUNC INIT(SLUICE_MODULE)() { return PyModule_Create(&definition); }
