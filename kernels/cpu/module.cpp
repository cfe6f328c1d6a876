// The kernels as a Python module. Addresses and sizes come in as integers; kernels/cpu/native.py says what they mean
// and checks them: nothing here may be called from anywhere else. The interpreter's lock is released while computing.
#include "call.h"

#include "automaton_type.h"
#include "backing_methods.h"
#include "encoder_methods.h"
#include "layer_call.h"
#include "masks_call.h"
#include "sampling_methods.h"
#include "slots.h"
#include "sums_methods.h"

namespace {

using sluice::Arguments;
using sluice::Attention;
using sluice::cache;
using sluice::compute;
using sluice::Experts;
using sluice::Finish;
using sluice::Integer;
using sluice::layer;
using sluice::layers;
using sluice::Linear;
using sluice::method;
using sluice::Output;
using sluice::packed;
using sluice::Pool;
using sluice::Quantised;
using sluice::RotateAndWrite;
using sluice::Router;
using sluice::rows;
using sluice::shared_layers;
using sluice::Side;
using sluice::SideJob;

PyObject* set_threads(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const int threads = static_cast<int>(arguments.integer());
  if (!arguments.ok()) return nullptr;
  Pool::instance().set_threads(threads);
  Py_RETURN_NONE;
}

template <typename Weight>
PyObject* packed_size(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const int64_t rows = arguments.integer(), k = arguments.integer();
  const bool gated = arguments.integer() != 0;
  if (!arguments.ok()) return nullptr;
  return PyLong_FromLongLong(sluice::packed_size<Weight>(rows, k, gated));
}

template <int BITS, bool MINIMA>
PyObject* integer_size(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const int64_t rows = arguments.integer(), k = arguments.integer();
  const bool gated = arguments.integer() != 0;
  if (!arguments.ok()) return nullptr;
  return PyLong_FromLongLong(sluice::integer_size<BITS, MINIMA>(rows, k, gated));
}

template <typename Element, void (*PACK)(const Element*, Element*, int64_t, int64_t, bool)>
PyObject* pack(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const Element* weight = arguments.address<const Element>();
  Element* packed = arguments.address<Element>();
  const int64_t rows = arguments.integer(), k = arguments.integer();
  const bool gated = arguments.integer() != 0;
  if (!arguments.ok()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  PACK(weight, packed, rows, k, gated);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

template <int BITS, bool MINIMA>
PyObject* pack_integers(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Quantised weight;
  weight.levels = arguments.address<const uint8_t>();
  weight.scales = arguments.address<const uint16_t>();
  weight.minima = arguments.address<const uint16_t>();
  uint8_t* packed = arguments.address<uint8_t>();
  weight.rows = arguments.integer();
  weight.k = arguments.integer();
  weight.gated = arguments.integer() != 0;
  if (!arguments.ok()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  sluice::pack_integers<BITS, MINIMA>(weight, packed);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

Output output(Arguments& arguments) {
  Output to;
  to.bias = arguments.address<const float>();
  to.y = arguments.address<float>();
  to.m = arguments.integer();
  to.n = to.y_stride = arguments.integer();
  to.finish = static_cast<Finish>(arguments.integer());
  to.wanted = sluice::masks(arguments);
  return to;
}

template <typename Weight>
PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Linear<Weight> job;
  job.x = arguments.address<const float>();
  job.x_stride = arguments.integer();
  job.k = arguments.integer();
  job.norm_eps = arguments.real();
  job.norm = arguments.address<const float>();
  job.weight = arguments.address<const Weight>();
  job.to = output(arguments);
  return arguments.ok() ? compute(job) : nullptr;
}

template <int BITS, bool MINIMA>
PyObject* integer(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Integer<BITS, MINIMA> job;
  job.x = arguments.address<const float>();
  job.x_stride = arguments.integer();
  job.k = arguments.integer();
  job.norm_eps = arguments.real();
  job.norm = arguments.address<const float>();
  job.weight = arguments.address<const uint8_t>();
  job.to = output(arguments);
  return arguments.ok() ? compute(job) : nullptr;
}

template <typename Element>
PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Attention<Element> job;
  job.q = arguments.address<const float>();
  job.q_stride = arguments.integer();
  job.cache = cache<Element>(arguments);
  job.kv_heads = arguments.integer();
  job.heads = arguments.integer();
  job.dim = arguments.integer();
  rows(arguments, job);
  job.window = arguments.integer();
  job.scale = arguments.real();
  job.cap = arguments.real();
  job.sinks = arguments.address<const float>();
  job.out = arguments.address<float>();
  job.out_stride = job.heads * job.dim;
  job.ends = arguments.optional<const int64_t>();
  return arguments.ok() ? compute(job) : nullptr;
}

template <typename Element>
PyObject* rotate_and_write(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  RotateAndWrite<Element> job;
  job.heads = arguments.address<float>();
  job.cis = arguments.address<const float>();
  job.tokens = arguments.integer();
  job.num_heads = arguments.integer();
  job.kv_heads = arguments.integer();
  job.dim = arguments.integer();
  job.cache = cache<Element>(arguments);
  job.slots = arguments.address<const int64_t>();
  job.stride = (job.num_heads + 2 * job.kv_heads) * job.dim;
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* low_rank(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  SideJob job;
  job.side = arguments.address<const Side>();
  job.x = arguments.address<float>();
  job.inputs = arguments.integer();
  job.y = arguments.address<float>();
  job.outputs = arguments.integer();
  job.tokens = arguments.integer();
  job.format = static_cast<sluice::Format>(arguments.integer());
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* experts(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Experts job;
  job.gate_up = packed(arguments);
  job.down = packed(arguments);
  job.gate = static_cast<Finish>(arguments.integer());
  job.router = arguments.address<const Router>();
  job.eps = arguments.real();
  job.h = arguments.address<const float>();
  job.to = arguments.address<float>();
  job.tokens = arguments.integer();
  job.first = arguments.integer();
  job.held = arguments.integer();
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* soft_cap(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::SoftCap job;
  job.x = arguments.address<float>();
  job.num = arguments.integer();
  job.cap = arguments.real();
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* keep(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  sluice::Keep job;
  job.states = arguments.address<const float>();
  job.tokens = arguments.integer();
  job.width = arguments.integer();
  job.table = arguments.address<uint16_t>();
  job.stride = arguments.integer();
  job.slots = arguments.address<const int64_t>();
  return arguments.ok() ? compute(job) : nullptr;
}

// By the element's name in kernels/cpu/native.py.
PyMethodDef methods[] = {
    method<set_threads>("set_threads"),
    method<packed_size<float>>("packed_size_float32"),
    method<packed_size<uint16_t>>("packed_size_bfloat16"),
    method<integer_size<8, false>>("packed_size_int8"),
    method<integer_size<8, true>>("packed_size_int8_affine"),
    method<integer_size<4, false>>("packed_size_int4"),
    method<integer_size<4, true>>("packed_size_int4_affine"),
    method<pack<float, sluice::pack<float>>>("pack_float32"),
    method<pack<uint16_t, sluice::pack<uint16_t>>>("pack_bfloat16"),
    method<pack_integers<8, false>>("pack_int8"),
    method<pack_integers<8, true>>("pack_int8_affine"),
    method<pack_integers<4, false>>("pack_int4"),
    method<pack_integers<4, true>>("pack_int4_affine"),
    method<linear<float>>("linear_float32"),
    method<linear<uint16_t>>("linear_bfloat16"),
    method<integer<8, false>>("linear_int8"),
    method<integer<8, true>>("linear_int8_affine"),
    method<integer<4, false>>("linear_int4"),
    method<integer<4, true>>("linear_int4_affine"),
    method<attention<float>>("attention_float32"),
    method<attention<uint16_t>>("attention_bfloat16"),
    method<attention<int8_t>>("attention_int8"),
    method<rotate_and_write<float>>("rotate_and_write_float32"),
    method<rotate_and_write<uint16_t>>("rotate_and_write_bfloat16"),
    method<rotate_and_write<int8_t>>("rotate_and_write_int8"),
    method<layer<float>>("layer_float32"),
    method<layer<uint16_t>>("layer_bfloat16"),
    method<layer<int8_t>>("layer_int8"),
    method<layers<float>>("layers_float32"),
    method<layers<uint16_t>>("layers_bfloat16"),
    method<layers<int8_t>>("layers_int8"),
    method<shared_layers<float>>("shared_layers_float32"),
    method<shared_layers<uint16_t>>("shared_layers_bfloat16"),
    method<shared_layers<int8_t>>("shared_layers_int8"),
    method<experts>("experts_into"),
    method<low_rank>("low_rank"),
    method<keep>("keep"),
    method<soft_cap>("soft_cap"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = NAME(SLUICE_MODULE),
    .m_doc = nullptr,
    .m_size = 0,
    .m_methods = methods,
    .m_slots = nullptr,
    .m_traverse = nullptr,
    .m_clear = nullptr,
    .m_free = nullptr,
};

}  // namespace

PyMODINIT_FUNC INIT(SLUICE_MODULE)() {
  if (sluice::HAS_TILES && !sluice::request_tiles()) {
    PyErr_SetString(PyExc_ImportError, "the operating system does not let this process use AMX");
    return nullptr;
  }
  PyObject *module = PyModule_Create(&definition), *automaton = sluice::automaton_type();
  const bool is_whole = module != nullptr && automaton != nullptr &&
                        PyModule_AddFunctions(module, sluice::sampling_methods()) == 0 &&
                        PyModule_AddFunctions(module, sluice::sums_methods()) == 0 &&
                        PyModule_AddFunctions(module, sluice::encoder_methods()) == 0 &&
                        PyModule_AddFunctions(module, sluice::backing_methods()) == 0 &&
                        PyModule_AddObjectRef(module, "SuffixAutomaton", automaton) == 0;
  Py_XDECREF(automaton);
  if (is_whole) return module;
  Py_XDECREF(module);
  return nullptr;
}
