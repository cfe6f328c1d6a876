"""Reads config.json's `quantization_config`: how a checkpoint that is published quantised stores its weights.

A table from `quant_method` to the function that checks its fields. Depends on the standard library only. Raises
ServiceError for anything else, with field, value and what is supported, before a weight is read.
"""

import dataclasses
from collections.abc import Callable, Mapping

from sluice_server.engine.models.fields import Fields, Json, shown

GROUPS = (32, 64, 128, -1)  # inputs that share a scale; -1: all
MX_GROUP, NV_GROUP = 32, 16  # of MXFP4 and NVFP4
NOT_READ = {
    "bitsandbytes": "its blocks are not read: take the checkpoint that it was made of, with --quantization int4 or int8"
}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredForm:
    """The format of a quantised checkpoint.

    Attributes:
        method: the layout of a projection's tensors, and the name that clients see; see `stored.READERS`.
        group: inputs that share a scale; -1 for all.
        bits: of a weight, where a layout has several.
        block: outputs and inputs that share a scale, where scales belong to rectangles.
        is_symmetric: whether there are no zero points.
        zero_shift: what must be added to a stored zero point.
    """

    method: str
    group: int = -1
    bits: int = 4
    block: tuple[int, int] | None = None
    is_symmetric: bool = True
    zero_shift: int = 0


def read_stored_form(config: Fields) -> StoredForm | None:
    """Returns the format, or None if config.json has none. Raises ServiceError MODEL_INVALID."""
    if config.values.get("quantization_config") in (None, {}):
        return None
    own = config.within("quantization_config")
    method = own.values.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        reason = NOT_READ.get(method, "") if isinstance(method, str) else ""
        supported = f"supported are {', '.join(METHODS)}"
        raise own.wrong("quant_method", f"is {shown(method)}; {f'{reason}; ' if reason else ''}{supported}")
    return read(own)


def _awq(own: Fields) -> StoredForm:
    """Checks AutoAWQ's fields: 4-bit values in the order that its GEMM kernel reads."""
    _demand(own, "bits", 4)
    _demand(own, "version", "gemm", "GEMM", default="gemm")
    _demand(own, "format", "gemm", default="gemm")
    _demand(own, "zero_point", True, default=True)
    return StoredForm("awq", _group(own), is_symmetric=False)


def _gptq(own: Fields) -> StoredForm:
    """Checks the fields of AutoGPTQ and GPTQModel: zero points are stored less one, except in their second format."""
    _demand(own, "bits", 4, 8)
    _demand(own, "desc_act", True, False, default=False)
    _demand(own, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    _demand(own, "format", "gptq", "gptq_v2", default="gptq")
    _demand(own, "is_marlin_format", False, default=False)
    _demand(own, "pack_dtype", "int32", default="int32")
    _demand(own, "lm_head", False, default=False)
    _demand(own, "dynamic", None, {}, default=None)
    is_second = "gptq_v2" in (own.values.get("checkpoint_format"), own.values.get("format"))
    bits = own.values["bits"]
    assert isinstance(bits, int)
    return StoredForm("gptq", _group(own), bits, is_symmetric=False, zero_shift=0 if is_second else 1)


def _fbgemm(own: Fields) -> StoredForm:
    """Accepts FBGEMM: a scale per row. `activation_scale_ub` is ignored, as scales per row need no bound."""
    return StoredForm("fp8")


def _fp8(own: Fields) -> StoredForm:
    """Checks the fields of DeepSeek's and Qwen's fp8: a scale per block of the weight, or one for all of it.

    Activations are scaled per row at run time where they are rounded; stored, static scales of them are not used.
    """
    _demand(own, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    _demand(own, "activation_scheme", "dynamic", "static", default="dynamic")
    if own.values.get("weight_block_size") is None:
        return StoredForm("fp8")
    return StoredForm("fp8 blocks", block=_block(own, "weight_block_size"))


def _mxfp4(own: Fields) -> StoredForm:
    """Accepts MXFP4 as gpt-oss is published: experts in blocks of 32 four-bit floats with a power of two for each."""
    return StoredForm("mxfp4", MX_GROUP)


def _modelopt(own: Fields) -> StoredForm:
    """Checks ModelOpt's fields: NVFP4, or fp8 with a scale per weight. The cache has a format of its own."""
    _demand(own, "quant_algo", "NVFP4", "FP8")
    return StoredForm("nvfp4", NV_GROUP) if own.values["quant_algo"] == "NVFP4" else StoredForm("fp8")


def _compressed_tensors(own: Fields) -> StoredForm:
    """Checks the fields of compressed-tensors that all its formats share; a table has the formats."""
    _demand(own, "format", *COMPRESSED)
    _demand(own, "kv_cache_scheme", None, default=None)
    _demand(own, "sparsity_config", None, {}, {"format": "dense"}, default=None)
    _demand(own, "transform_config", None, {}, default=None)
    groups = own.within("config_groups")
    if len(groups.values) != 1:
        raise own.wrong("config_groups", f"has {len(groups.values)} groups; supported is 1")
    group = groups.within(next(iter(groups.values)))
    _demand(group, "targets", ["Linear"])
    _demand(group, "output_activations", None, default=None)
    weights = group.within("weights")
    _demand(weights, "dynamic", False, default=False)
    return COMPRESSED[str(own.values["format"])](group, weights)


def _compressed_float(group: Fields, weights: Fields) -> StoredForm:
    """Checks fp8 for weights and activations, a scale per weight, row or block."""
    for side in (weights, group.within("input_activations")):
        _demand(side, "num_bits", 8)
        _demand(side, "type", "float")
    _demand(weights, "strategy", "tensor", "channel", "block")
    _demand(weights, "symmetric", True, default=True)
    if weights.values["strategy"] != "block":
        return StoredForm("fp8")
    return StoredForm("fp8 blocks", block=_block(weights, "block_structure"))


def _compressed_int(group: Fields, weights: Fields) -> StoredForm:
    """Checks int8 for weights and activations (W8A8), a scale per weight or row; activations have one per token."""
    for side in (weights, group.within("input_activations")):
        _demand(side, "num_bits", 8)
        _demand(side, "type", "int")
    _demand(weights, "symmetric", True, default=True)
    _demand(weights, "strategy", "tensor", "channel")
    return StoredForm("w8a8", bits=8)


def _compressed_packed(group: Fields, weights: Fields) -> StoredForm:
    """Checks integers of 4 or 8 bits packed into words; activations are not rounded by the format."""
    _demand(group, "input_activations", None, default=None)
    _demand(weights, "num_bits", 4, 8)
    _demand(weights, "type", "int")
    _demand(weights, "strategy", "group", "channel")
    _demand(weights, "symmetric", True, False, default=True)
    _demand(weights, "actorder", None, "static", "weight", "group", "dynamic", default=None)
    bits, is_symmetric = weights.values["num_bits"], weights.values.get("symmetric", True)
    assert isinstance(bits, int) and isinstance(is_symmetric, bool)
    size = _group(weights) if weights.values["strategy"] == "group" else -1
    return StoredForm("packed integers", size, bits, is_symmetric=is_symmetric)


def _compressed_float4(group: Fields, weights: Fields) -> StoredForm:
    """Checks floats of 4 bits: NVFP4, in groups of 16. Activations are not rounded: their scales are not used."""
    _demand(weights, "num_bits", 4)
    _demand(weights, "type", "float")
    _demand(weights, "group_size", NV_GROUP)
    return StoredForm("nvfp4", NV_GROUP)


COMPRESSED: Mapping[str, Callable[[Fields, Fields], StoredForm]] = {
    "float-quantized": _compressed_float,
    "int-quantized": _compressed_int,
    "nvfp4-pack-quantized": _compressed_float4,
    "pack-quantized": _compressed_packed,
}


def _gguf(own: Fields) -> StoredForm:
    """Accepts what is made for a GGUF file, whose tensors name their types themselves."""
    return StoredForm("gguf")


METHODS: Mapping[str, Callable[[Fields], StoredForm]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gguf": _gguf,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _group(own: Fields) -> int:
    _demand(own, "group_size", *GROUPS)
    group = own.values["group_size"]
    assert isinstance(group, int)
    return group


def _block(own: Fields, name: str) -> tuple[int, int]:
    """Returns the sides of a block: outputs, inputs."""
    match own.values.get(name):
        case [int(rows), int(width)] if rows > 0 and width > 0:
            return rows, width
        case value:
            raise own.wrong(name, f"is {shown(value)}; it must be two sizes, such as [128, 128]")


def _demand(fields: Fields, name: str, *allowed: Json, default: Json = None) -> None:
    """Raises ServiceError unless the field, or its default, is one of `allowed`; True is not equal to 1."""
    value = fields.values.get(name, default)
    if not any(type(value) is type(one) and value == one for one in allowed):
        verb = "is" if len(allowed) == 1 else "are"
        raise fields.wrong(name, f"is {shown(value)}; supported {verb} {', '.join(map(repr, allowed))}")
