// The kernels as a Python module. Addresses and sizes come in as integers; kernels/native.py says what they mean and
// checks them: nothing here may be called from anywhere else. The interpreter's lock is released while computing.
#include "call.h"

#include "attention.h"
#include "linear.h"
#include "pool.h"

namespace {

using sluice::Arguments;
using sluice::Attention;
using sluice::compute;
using sluice::Finish;
using sluice::Linear;
using sluice::method;
using sluice::Pool;
using sluice::RotateAndWrite;

PyObject* set_threads(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const int threads = static_cast<int>(arguments.integer());
  if (!arguments.ok()) return nullptr;
  Pool::instance().set_threads(threads);
  Py_RETURN_NONE;
}

PyObject* packed_size(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const int64_t rows = arguments.integer(), k = arguments.integer();
  const bool gated = arguments.integer() != 0;
  if (!arguments.ok()) return nullptr;
  return PyLong_FromLongLong(sluice::packed_size(rows, k, gated));
}

PyObject* pack(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const float* weight = arguments.address<const float>();
  float* packed = arguments.address<float>();
  const int64_t rows = arguments.integer(), k = arguments.integer();
  const bool gated = arguments.integer() != 0;
  if (!arguments.ok()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  sluice::pack(weight, packed, rows, k, gated);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Linear job;
  job.x = arguments.address<const float>();
  job.x_stride = arguments.integer();
  job.weight = arguments.address<const float>();
  job.bias = arguments.address<const float>();
  job.y = arguments.address<float>();
  job.m = arguments.integer();
  job.n = arguments.integer();
  job.k = arguments.integer();
  job.norm_eps = arguments.real();
  job.finish = static_cast<Finish>(arguments.integer());
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Attention job;
  job.q = arguments.address<const float>();
  job.q_stride = arguments.integer();
  job.cache = arguments.address<const float>();
  job.block_size = arguments.integer();
  job.kv_heads = arguments.integer();
  job.heads = arguments.integer();
  job.dim = arguments.integer();
  job.tables = arguments.address<const int32_t>();
  job.table_width = arguments.integer();
  job.firsts = arguments.address<const int64_t>();
  job.counts = arguments.address<const int64_t>();
  job.contexts = arguments.address<const int64_t>();
  job.rows = arguments.integer();
  job.window = arguments.integer();
  job.scale = arguments.real();
  job.out = arguments.address<float>();
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* rotate_and_write(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  RotateAndWrite job;
  job.heads = arguments.address<float>();
  job.cis = arguments.address<const float>();
  job.tokens = arguments.integer();
  job.num_heads = arguments.integer();
  job.kv_heads = arguments.integer();
  job.dim = arguments.integer();
  job.cache = arguments.address<float>();
  job.slots = arguments.address<const int64_t>();
  return arguments.ok() ? compute(job) : nullptr;
}

PyMethodDef methods[] = {
    method<set_threads>("set_threads"),
    method<packed_size>("packed_size"),
    method<pack>("pack"),
    method<linear>("linear"),
    method<attention>("attention"),
    method<rotate_and_write>("rotate_and_write"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = NAME(SLUICE_MODULE), .m_doc = nullptr, .m_size = 0, .m_methods = methods,
    .m_slots = nullptr, .m_traverse = nullptr, .m_clear = nullptr, .m_free = nullptr,
};

}  // namespace

PyMODINIT_FUNC INIT(SLUICE_MODULE)() { return PyModule_Create(&definition); }
