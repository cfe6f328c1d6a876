// Backing of memory as methods of the module; kernels/cpu/backing.py says what their arguments mean.
#include "backing.h"

#include "backing_methods.h"

namespace sluice {
namespace {

PyObject* add(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  auto* const first = arguments.address<uint8_t>();
  const int64_t size = arguments.integer();
  return arguments.ok() ? PyBool_FromLong(Backing::instance().add(first, size)) : nullptr;
}

PyObject* drop(PyObject*, PyObject* const*, Py_ssize_t) {
  Py_BEGIN_ALLOW_THREADS;
  Backing::instance().drop();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {method<add>("backing_add"), method<drop>("backing_drop"), {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* backing_methods() { return methods; }

}  // namespace sluice
