// The suffix automaton as a Python type; kernels/reference/automaton.py says what its methods and attributes mean.
#include "automaton_type.h"

#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <new>

#include "automaton.h"

namespace {

using sluice::Automaton;

struct Object {
  PyObject_HEAD Automaton* automaton;
  long long num_tokens, match_len, match_end;
};

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  Object* self = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->automaton = new (std::nothrow) Automaton;
  if (self->automaton != nullptr) return reinterpret_cast<PyObject*>(self);
  Py_DECREF(self);
  return PyErr_NoMemory();
}

void destroy(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<Object*>(object)->automaton;
  type->tp_free(object);
  Py_DECREF(type);
}

// Reads items [num_tokens, end) of a list or tuple. Returns false with an exception set if an item is no token.
bool read(Object* self, PyObject* tokens, Py_ssize_t end) {
  for (Py_ssize_t i = self->automaton->num_tokens(); i < end; ++i) {
    const long token = PyLong_AsLong(PySequence_Fast_GET_ITEM(tokens, i));
    if (token < 0 || token > INT32_MAX) {
      if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_ValueError, "%ld is no token", token);
      return false;
    }
    self->automaton->append(static_cast<int32_t>(token));
  }
  return true;
}

PyObject* extend(PyObject* object, PyObject* const* values, Py_ssize_t num) {
  Object* self = reinterpret_cast<Object*>(object);
  const long long most = num == 2 ? PyLong_AsLongLong(values[1]) : PY_SSIZE_T_MAX;
  if (num < 1 || num > 2) return PyErr_Format(PyExc_TypeError, "takes 1 or 2 arguments, not %zd", num);
  if (PyErr_Occurred() != nullptr) return nullptr;
  PyObject* tokens = PySequence_Fast(values[0], "tokens are a sequence");
  if (tokens == nullptr) return nullptr;
  const long long known = self->automaton->num_tokens(), all = PySequence_Fast_GET_SIZE(tokens);
  bool is_read = false;
  try {
    is_read = read(self, tokens, all - known > most ? known + most : all);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  Py_DECREF(tokens);
  self->num_tokens = self->automaton->num_tokens();
  self->match_len = self->automaton->match_len();
  self->match_end = self->automaton->match_end();
  if (!is_read) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    sluice::method<extend>("extend"),
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"num_tokens", T_LONGLONG, offsetof(Object, num_tokens), READONLY, nullptr},
    {"match_len", T_LONGLONG, offsetof(Object, match_len), READONLY, nullptr},
    {"match_end", T_LONGLONG, offsetof(Object, match_end), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "sluice_server.kernels.cpu.SuffixAutomaton",
    .basicsize = sizeof(Object),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

}  // namespace

PyObject* sluice::automaton_type() { return PyType_FromSpec(&spec); }
