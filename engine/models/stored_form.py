"""Reads config.json's `quantization_config`: AWQ, GPTQ, and fp8 as compressed-tensors and FBGEMM write it.

Depends on the standard library only. Raises ServiceError for anything else, with field, value and what is supported,
before a weight is read.
"""

import dataclasses
from collections.abc import Callable, Mapping

from sluice_server.engine.models.fields import Fields, Json, shown

GROUPS = (32, 64, 128, -1)  # inputs that share a scale of 4 bits; -1: all


@dataclasses.dataclass(frozen=True, slots=True)
class StoredForm:
    """The format of a quantised checkpoint.

    Attributes:
        method: awq, gptq, gguf or fp8: the layout, and the name that clients see.
        group: for awq and gptq, inputs that share a scale; -1 for all.
    """

    method: str
    group: int = -1


def read_stored_form(config: Fields) -> StoredForm | None:
    """Returns the format, or None if config.json has none. Raises ServiceError MODEL_INVALID."""
    if config.values.get("quantization_config") in (None, {}):
        return None
    own = config.within("quantization_config")
    method = own.values.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise own.wrong("quant_method", f"is {shown(method)}; supported are {', '.join(METHODS)}")
    return read(own)


def _awq(own: Fields) -> StoredForm:
    """Checks AutoAWQ's fields: 4-bit values in the order that its GEMM kernel reads."""
    _demand(own, "bits", 4)
    _demand(own, "version", "gemm", "GEMM", default="gemm")
    _demand(own, "format", "gemm", default="gemm")
    _demand(own, "zero_point", True, default=True)
    return StoredForm("awq", _group(own))


def _gptq(own: Fields) -> StoredForm:
    """Checks the fields of AutoGPTQ and GPTQModel: zero points are stored less one."""
    _demand(own, "bits", 4)
    _demand(own, "desc_act", False, default=False)
    _demand(own, "checkpoint_format", "gptq", default="gptq")
    _demand(own, "format", "gptq", default="gptq")
    _demand(own, "is_marlin_format", False, default=False)
    _demand(own, "pack_dtype", "int32", default="int32")
    _demand(own, "lm_head", False, default=False)
    _demand(own, "dynamic", None, {}, default=None)
    return StoredForm("gptq", _group(own))


def _fbgemm(own: Fields) -> StoredForm:
    """Accepts FBGEMM: a scale per row. `activation_scale_ub` is ignored, as scales per row need no bound."""
    return StoredForm("fp8")


def _compressed_tensors(own: Fields) -> StoredForm:
    """Checks compressed-tensors' fields: fp8 for weights and activations, a scale per weight or per row.

    Activations are scaled per row at run time; stored, static scales of activations are not used.
    """
    _demand(own, "format", "float-quantized")
    _demand(own, "kv_cache_scheme", None, default=None)
    _demand(own, "sparsity_config", None, {}, {"format": "dense"}, default=None)
    _demand(own, "transform_config", None, {}, default=None)
    groups = own.within("config_groups")
    if len(groups.values) != 1:
        raise own.wrong("config_groups", f"has {len(groups.values)} groups; supported is 1")
    group = groups.within(next(iter(groups.values)))
    _demand(group, "targets", ["Linear"])
    weights, activations = group.within("weights"), group.within("input_activations")
    for side in (weights, activations):
        _demand(side, "num_bits", 8)
        _demand(side, "type", "float")
    _demand(weights, "strategy", "tensor", "channel")
    _demand(weights, "symmetric", True, default=True)
    _demand(weights, "dynamic", False, default=False)
    _demand(group, "output_activations", None, default=None)
    return StoredForm("fp8")


def _gguf(own: Fields) -> StoredForm:
    """Accepts what is made for a GGUF file, whose tensors name their types themselves."""
    return StoredForm("gguf")


METHODS: Mapping[str, Callable[[Fields], StoredForm]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "gguf": _gguf,
    "gptq": _gptq,
}


def _group(own: Fields) -> int:
    _demand(own, "group_size", *GROUPS)
    group = own.values["group_size"]
    assert isinstance(group, int)
    return group


def _demand(fields: Fields, name: str, *allowed: Json, default: Json = None) -> None:
    """Raises ServiceError unless the field, or its default, is one of `allowed`; True is not equal to 1."""
    value = fields.values.get(name, default)
    if not any(type(value) is type(one) and value == one for one in allowed):
        verb = "is" if len(allowed) == 1 else "are"
        raise fields.wrong(name, f"is {shown(value)}; supported {verb} {', '.join(map(repr, allowed))}")
