"""Quantised checkpoints that are refused, each with the reason."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config, read_head_config
from sluice_server.engine.models.weights import Checkpoint
from tests.engine.models.test_stored import CPU, FORMS, load
from tests.oracle import published
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.published import (
    AWQ,
    FBGEMM,
    SHAPE,
    publish,
)

METHODS = "supported are awq, compressed-tensors, fb"


REFUSED: list[tuple[str, str, object, str]] = [
    ("awq", "quant_method", "bitsandbytes", rf"is 'bitsandbytes'; its blocks are not read: take .*; {METHODS}"),
    ("awq", "quant_method", "exl2", f"quant_method is 'exl2'; {METHODS}"),
    ("awq", "quant_method", None, "quant_method is None"),
    ("awq", "bits", 8, r"quantization_config\.bits is 8; supported is 4"),
    ("awq", "bits", True, "bits is True; supported is 4"),
    ("awq", "group_size", 256, "group_size is 256; supported are 32, 64, 128, -1"),
    ("awq", "version", "gemv", "version is 'gemv'; supported are 'gemm', 'GEMM'"),
    ("awq", "zero_point", False, "zero_point is False; supported is True"),
    ("gptq", "bits", 3, "bits is 3; supported are 4, 8"),
    ("gptq", "desc_act", 1, "desc_act is 1; supported are True, False"),
    ("gptq", "checkpoint_format", "marlin", "checkpoint_format is 'marlin'; supported are 'gptq', 'gptq_v2'"),
    ("gptq", "format", "marlin", "format is 'marlin'; supported are 'gptq', 'gptq_v2'"),
    ("gptq", "lm_head", True, "lm_head is True; supported is False"),
    ("gptq", "dynamic", {"-:.*mlp.*": {}}, "dynamic is .*; supported are None, {}"),
    ("blocks", "fmt", "e5m2", "fmt is 'e5m2'; supported are 'e4m3', 'float8_e4m3fn'"),
    ("blocks", "weight_block_size", [128], r"weight_block_size is \[128\]; it must be two sizes, such as"),
    ("blocks", "weight_block_size", [0, 128], r"weight_block_size is \[0, 128\]; it must be two sizes, such as"),
    ("nvfp4", "quant_algo", "W4A8_AWQ", "quant_algo is 'W4A8_AWQ'; supported are 'NVFP4', 'FP8'"),
    ("channel", "format", "marlin-24", "format is 'marlin-24'; supported are 'float-quantized', 'int-quantized'"),
    ("channel", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is .*; supported is None"),
    ("channel", "config_groups", {}, "config_groups has 0 groups; supported is 1"),
    ("channel", "config_groups.group_0.targets", ["re:.*"], r"config_groups\.group_0\.targets is .*'Linear'"),
    ("channel", "config_groups.group_0.weights.num_bits", 4, r"group_0\.weights\.num_bits is 4; supported is 8"),
    ("channel", "config_groups.group_0.weights.strategy", "group", "is 'group'; .* 'tensor', 'channel', 'block'"),
    ("channel", "config_groups.group_0.input_activations", None, "input_activations is None; it must be an object"),
    ("w8a8", "config_groups.group_0.weights.symmetric", False, "symmetric is False; supported is True"),
    ("w4a16", "config_groups.group_0.weights.num_bits", 3, "num_bits is 3; supported are 4, 8"),
    ("w4a16", "config_groups.group_0.weights.group_size", 16, "group_size is 16; supported are 32, 64, 128, -1"),
    ("w4a16", "config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations is .*; supported is None"),
    ("compressed-nvfp4", "config_groups.group_0.weights.group_size", 32, "group_size is 32; supported is 16"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """config.json of a checkpoint that is not quantised."""
    return (make_checkpoint(tmp_path_factory.mktemp("plain"), SHAPE) / "config.json").read_text()


@pytest.mark.parametrize(("form", "field", "value", "said"), REFUSED)
def test_what_is_not_supported_is_refused(
    form: str, field: str, value: object, said: str, tmp_path: Path, plain: str
) -> None:
    """The refusal comes before any weight is read. A dotted name is a field within a field."""
    own = copy.deepcopy(FORMS[form][0])
    at, (*path, last) = own, field.split(".")
    for one in path:
        at = at[one]
    at[last] = value
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(plain), "quantization_config": own}))
    with pytest.raises(ServiceError, match=rf"config\.json: .*{said}"):
        read_config(tmp_path)


def test_tensors_that_are_not_what_the_config_says_are_refused(tmp_path: Path) -> None:
    found = publish(tmp_path, *FORMS["gptq"][:2], dataclasses.replace(SHAPE, layers=1))
    path = found.directory / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.0.self_attn.q_proj"
    for end, tensor, said in (
        ("g_idx", whole[f"{name}.g_idx"].flip(0) + torch.arange(128).int(), "g_idx names group 127, and there are 1"),
        ("qweight", whole[f"{name}.qweight"][:8], r"has shape \[8, 128\]; config\.json implies \[16, 128\]"),
        ("scales", whole[f"{name}.scales"].double(), "has dtype torch.float64; config.json implies torch.float16 or"),
        ("qzeros", None, f"no safetensors file holds the tensor {name}.qzeros"),
    ):
        changed = {key: value for key, value in whole.items() if key != f"{name}.{end}"}
        save_file(changed if tensor is None else {**changed, f"{name}.{end}": tensor}, path)
        with pytest.raises(ServiceError, match=said):
            load(found.directory)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("awq", (252, 128), "up_proj: 252 rows of 4 bits fill no words of 32: multiples of 8 are supported"),
        ("gptq", (256, 124), "up_proj: 124 inputs of 4 bits fill no words of 32: multiples of 8 are supported"),
        ("nvfp4", (256, 120), "up_proj: 120 inputs: multiples of 16 are supported"),
    ],
)
def test_sizes_that_a_layout_does_not_have_are_refused(
    name: str, shape: tuple[int, int], said: str, tmp_path: Path
) -> None:
    found = publish(tmp_path, *FORMS[name][:2], dataclasses.replace(SHAPE, layers=1))
    source = Checkpoint(found.directory, torch.float32, CPU, read_config(found.directory).stored)
    with pytest.raises(ServiceError, match=said):
        source.stored("model.layers.0.mlp.up_proj", *shape)


def test_float8_without_its_scales_is_refused(tmp_path: Path) -> None:
    found = publish(tmp_path, FBGEMM, published.fp8, dataclasses.replace(SHAPE, layers=1))
    path = found.directory / "model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if "weight_scale" not in name}, path)
    with pytest.raises(ServiceError, match=r"is torch\.float8_e4m3fn, and .*quantization_config names no scales"):
        load(found.directory)


def test_a_quantised_head_that_drafts_is_refused(plain: str, tmp_path: Path) -> None:
    text = {**json.loads(plain), "num_hidden_layers": 1, "quantization_config": AWQ}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ServiceError, match="quant_method is 'awq'; an EAGLE-3 head must not be quantised"):
        read_head_config(tmp_path)
