// The calling convention from Python to the kernels of a module: addresses and sizes are passed as integers.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace sluice {

// Reads the arguments of one call in order. `ok` returns whether all were numbers and all were read; if not, an
// exception is set.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t num) : values_(values), num_(num) {}

  int64_t integer() { return at_ < num_ ? PyLong_AsLongLong(values_[at_++]) : (++at_, 0); }

  float real() { return at_ < num_ ? static_cast<float>(PyFloat_AsDouble(values_[at_++])) : (++at_, 0.0f); }

  template <typename T>
  T* address() {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(integer()));
  }

  // The last argument, which calls may leave out: then null.
  template <typename T>
  T* optional() {
    return at_ < num_ ? address<T>() : nullptr;
  }

  bool ok() {
    if (PyErr_Occurred() != nullptr) return false;
    if (at_ == num_) return true;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", at_, num_);
    return false;
  }

 private:
  PyObject* const* values_;
  Py_ssize_t num_;
  Py_ssize_t at_ = 0;
};

// Reads numbers that Python keeps as float64, with the methods of `Arguments`: addresses and sizes are below 2^53.
class Numbers {
 public:
  explicit Numbers(const double* from) : at_(from) {}

  int64_t integer() { return static_cast<int64_t>(*at_++); }

  float real() { return static_cast<float>(*at_++); }

  template <typename T>
  T* address() {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(integer()));
  }

 private:
  const double* at_;
};

template <typename Job>
PyObject* compute(Job& job) {
  Py_BEGIN_ALLOW_THREADS;
  run(job);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

template <PyObject* (*FUNCTION)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(FUNCTION)), METH_FASTCALL, nullptr};
}

}  // namespace sluice

// The build names a module after its instruction set: v4, v4_vnni, …
#define TEXT(name) #name
#define NAME(name) TEXT(name)
#define JOIN(prefix, name) prefix##name
#define INIT(name) JOIN(PyInit_, name)
