// Sums of ranks as methods of the module; kernels/cpu/sums.py says what their arguments mean. They return what went
// wrong, a pair of numbers (0, 0 if nothing).
#include "sums.h"

#include "segment_call.h"
#include "sums_methods.h"

namespace sluice {
namespace {

template <typename Job>
PyObject* finish(Job& job) {
  Py_BEGIN_ALLOW_THREADS;
  run(job);
  tell(job.segment, job.outcome);
  Py_END_ALLOW_THREADS;
  return Py_BuildValue("LL", static_cast<long long>(job.outcome.fault), static_cast<long long>(job.outcome.rank));
}

PyObject* exchange(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Exchange job;
  job.segment = segment(arguments);
  job.value = arguments.integer();
  job.values = arguments.address<int64_t>();
  return arguments.ok() ? finish(job) : nullptr;
}

PyObject* add(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  AddSums job;
  job.segment = segment(arguments);
  job.into = arguments.address<float>();
  job.rows = arguments.integer();
  job.width = arguments.integer();
  for (int64_t left = arguments.integer(); left > 0; --left) job.partials.push_back(arguments.address<const float>());
  return arguments.ok() ? finish(job) : nullptr;
}

PyObject* gather(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  GatherSums job;
  job.segment = segment(arguments);
  job.part = arguments.address<const float>();
  job.rows = arguments.integer();
  job.widths = arguments.address<const int64_t>();
  job.to = arguments.address<float>();
  return arguments.ok() ? finish(job) : nullptr;
}

// Marks a rank as there, or as having given up because of a rank.
PyObject* mark(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  const Segment own = segment(arguments);
  const int64_t process = arguments.integer(), broken = arguments.integer();
  if (!arguments.ok()) return nullptr;
  if (process != 0) own.line(own.rank).attached.store(process, std::memory_order_release);
  if (broken != 0) own.line(own.rank).broken.store(broken, std::memory_order_release);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    method<exchange>("sums_exchange"), method<add>("sums_add"),        method<gather>("sums_gather"),
    method<mark>("sums_mark"),         {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* sums_methods() { return methods; }

}  // namespace sluice
