// Encoders as methods of the module; kernels/cpu/native_encoders.py says what their arguments mean.
#include "encoder.h"

#include "encoder_methods.h"
#include "packed_call.h"

namespace sluice {
namespace {

RowNorm row_norm(Arguments& arguments) {
  RowNorm norm;
  norm.is_root = arguments.integer() != 0;
  norm.weight = arguments.address<const float>();
  norm.bias = arguments.address<const float>();
  norm.eps = arguments.real();
  return norm;
}

// Arguments as those of `native_encoders.EncoderCall`, then those of some rows.
EncoderRows encoder_rows(Arguments& arguments) {
  EncoderRows of;
  EncoderLayer& layer = of.layer;
  layer.qkv = packed(arguments);
  layer.output = packed(arguments);
  layer.up = packed(arguments);
  layer.down = packed(arguments);
  layer.attention_norm = row_norm(arguments);
  layer.mlp_norm = row_norm(arguments);
  layer.activation = static_cast<Activation>(arguments.integer());
  layer.is_gated = arguments.integer() != 0;
  of.heads.heads = arguments.integer();
  of.heads.dim = arguments.integer();
  of.heads.first = arguments.address<float>();
  of.heads.tokens = arguments.integer();
  of.h = arguments.address<float>();
  of.first = arguments.integer();
  of.num = arguments.integer();
  return of;
}

PyObject* heads_size(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  WholeHeads heads;
  heads.heads = arguments.integer();
  heads.dim = arguments.integer();
  heads.tokens = arguments.integer();
  return arguments.ok() ? PyLong_FromLongLong(heads.size()) : nullptr;
}

PyObject* project(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Project job;
  job.of = encoder_rows(arguments);
  job.cis = arguments.address<const float>();
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* advance(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Advance job;
  job.of = encoder_rows(arguments);
  job.runs = arguments.address<const Run>();
  job.num_runs = arguments.integer();
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* activate_rows(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  Activate job;
  job.activation = static_cast<Activation>(arguments.integer());
  job.x = arguments.address<float>();
  job.rows = arguments.integer();
  job.width = arguments.integer();
  return arguments.ok() ? compute(job) : nullptr;
}

PyObject* norm_rows(PyObject*, PyObject* const* values, Py_ssize_t num) {
  Arguments arguments(values, num);
  NormRows job;
  job.norm = row_norm(arguments);
  job.x = arguments.address<const float>();
  job.to = arguments.address<float>();
  job.rows = arguments.integer();
  job.width = arguments.integer();
  return arguments.ok() ? compute(job) : nullptr;
}

PyMethodDef methods[] = {
    method<heads_size>("encoder_heads_size"), method<project>("encoder_project"), method<advance>("encoder_advance"),
    method<activate_rows>("activate_rows"),   method<norm_rows>("norm_rows"),     {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* encoder_methods() { return methods; }

}  // namespace sluice
