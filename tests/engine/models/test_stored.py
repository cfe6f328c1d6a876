"""Published quantised checkpoints: logits of the weights they represent, on CPU and on the interpreted GPU kernels;
unsupported ones are refused with field, value and the supported values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers import loader as layers
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.formats.gpu_linear import EightBitsOnGpu, Int4OnGpu
from sluice_server.kernels.formats.integer_linear import IntegerLinear, NativeIntegerLinear
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packed_weights import Packed, dequantise
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.oracle import published
from tests.oracle.checkpoints import Shape, reference
from tests.oracle.published import (
    AWQ,
    FBGEMM,
    FP8_BLOCKS,
    GPTQ,
    MODELOPT,
    SHAPE,
    Published,
    compressed,
    compressed_float4,
    compressed_int8,
    compressed_packed,
    publish,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = [5, 9, 77, 3, 40, 41, 8]
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
WIDENED, ROUNDS = "no kernel here takes the form", "activations rounded to 8 bits"
GPTQ8 = {**GPTQ, "bits": 8}
FORMS: dict[str, tuple[dict[str, Any], Quantise, str]] = {
    "awq": (AWQ, published.awq, ROUNDS),
    "awq-32": ({**AWQ, "group_size": 32}, functools.partial(published.awq, group=32), ROUNDS),
    "awq-one": ({**AWQ, "group_size": -1}, functools.partial(published.awq, group=-1), ROUNDS),
    "gptq": (GPTQ, published.gptq, ROUNDS),
    "gptq-zeros": ({**GPTQ, "sym": False}, functools.partial(published.gptq, symmetric=False), ROUNDS),
    "gptq-order": (
        {**GPTQ, "desc_act": True, "group_size": 64},
        functools.partial(published.gptq, group=64, mixed=True),
        WIDENED,
    ),
    "gptq-v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        functools.partial(published.gptq, symmetric=False, shift=0),
        ROUNDS,
    ),
    "gptq-8": (GPTQ8, functools.partial(published.gptq, bits=8), ROUNDS),
    "gptq-8-zeros": (GPTQ8, functools.partial(published.gptq, bits=8, symmetric=False), ROUNDS),
    "fbgemm": (FBGEMM, published.fp8, "multiplies no fp8"),
    "channel": (compressed("channel"), published.fp8, "multiplies no fp8"),
    "tensor": (compressed("tensor"), functools.partial(published.fp8, per_row=False, shape=(1,)), "no fp8"),
    "scalar": (compressed("tensor"), functools.partial(published.fp8, per_row=False, shape=()), "no fp8"),
    "blocks": (FP8_BLOCKS, published.fp8_blocks, WIDENED),
    "compressed-blocks": (compressed("block"), functools.partial(published.fp8_blocks, name="weight_scale"), WIDENED),
    "w8a8": (compressed_int8(), published.int8, ROUNDS),
    "w4a16": (compressed_packed(), published.packed, ROUNDS),
    "w4a16-zeros": (
        compressed_packed(group=32, symmetric=False),
        functools.partial(published.packed, group=32, symmetric=False),
        ROUNDS,
    ),
    "w4a16-order": (
        compressed_packed(group=64, actorder="group"),
        functools.partial(published.packed, group=64, mixed=True),
        WIDENED,
    ),
    "w8a16": (compressed_packed(8, -1), functools.partial(published.packed, bits=8, group=-1), ROUNDS),
    "nvfp4": (MODELOPT, published.nvfp4, WIDENED),
    "compressed-nvfp4": (
        compressed_float4(),
        functools.partial(published.nvfp4, names=("weight_packed", "weight_global_scale")),
        WIDENED,
    ),
}


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(directory, read_config(directory), dtype, CPU)


def logits_of(model: Model) -> Tensor:
    meta = AttentionMetadata.build([len(IDS)], [len(IDS)], np.array([[0]], dtype=np.int32), 8, CPU)
    hidden = model.forward(torch.tensor(IDS), torch.arange(len(IDS)), model.new_cache(1, 8), meta)
    return model.logits(hidden)


@torch.inference_mode()
def meant(found: Published) -> Tensor:
    logits: Tensor = reference(found.meant)(torch.tensor([IDS])).logits[0]
    return logits


def assert_near(got: Tensor, want: Tensor, share: float) -> None:
    assert float((got - want).norm() / want.norm()) < share


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_what_weights_mean(name: str, tmp_path: Path) -> None:
    config, quantise, note = FORMS[name]
    found = publish(tmp_path, config, quantise)
    model = load(found.directory)
    assert_near(logits_of(model), meant(found), 0.1 if note == ROUNDS else 1e-5)
    assert len(model.notes) == 1 and note in model.notes[0]
    assert model.num_parameters == load(found.meant).num_parameters


@pytest.mark.parametrize("name", ["awq", "gptq", "channel", "tensor"])
def test_logits_on_the_kernels_of_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are interpreted over CPU tensors."""
    config, quantise, _ = FORMS[name]
    found = publish(tmp_path, config, quantise, dataclasses.replace(SHAPE, layers=1))
    on_gpu(monkeypatch, (9, 0))
    kept = watch(monkeypatch)
    logits = logits_of(load(found.directory))
    is_fp8 = name in ("channel", "tensor")
    assert {type(layer) for layer, _ in kept} == {EightBitsOnGpu if is_fp8 else Int4OnGpu}
    for layer, weight in kept:
        x = torch.randn(5, weight.shape[1])
        assert_near(layer.apply(x), x @ weight.t(), 0.08 if is_fp8 else 1e-4)
    assert_near(logits, meant(found), 0.3 if is_fp8 else 1e-3)


def test_what_a_gpu_without_fp8_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = publish(tmp_path, *FORMS["channel"][:2], dataclasses.replace(SHAPE, layers=1))
    on_gpu(monkeypatch, (8, 0))
    model = load(found.directory)
    assert "multiplies no fp8" in model.notes[0]
    assert_near(logits_of(model), meant(found), 1e-5)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Keeps weights as on a GPU of that compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        layers, "pack_stored", lambda packed, place: kinds.pack_stored(packed, place._replace(device=CUDA))
    )


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PackedLinear, Tensor]]:
    """Collects layers of quantised weights and the weights they represent."""
    kept: list[tuple[PackedLinear, Tensor]] = []
    keep = layers.LayerLoader._keep

    def watched(self: layers.LayerLoader, packed: Packed, bias: Tensor | None, gated: bool) -> PackedLinear:
        kept.append((keep(self, packed, bias, gated), dequantise(packed)))
        return kept[-1][0]

    monkeypatch.setattr(layers.LayerLoader, "_keep", watched)
    return kept


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-zeros"])
@pytest.mark.parametrize("ours", [True, False])
def test_weights_of_4_bits_are_multiplied_as_they_are(
    ours: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our own kernel, and by torch's operators where there is none: alike but for the order of sums."""
    found = publish(tmp_path, *FORMS[name][:2])
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    kept = watch(monkeypatch)
    logits = logits_of(load(found.directory))
    assert {type(layer) for layer, _ in kept} == {
        NativeIntegerLinear if ours and builds.is_available() else IntegerLinear
    }
    x = torch.randn(5, 128)
    heads, weight = next(one for one in kept if one[1].shape == (256, 128))
    assert_near(heads.apply(x), x @ weight.t(), 0.01)
    assert_near(logits, meant(found), 0.1)


@pytest.mark.parametrize(("name", "share"), [("awq", 0.2), ("gptq", 0.2), ("channel", 1e-5)])
def test_experts_are_read_in_any_of_these_forms(name: str, share: float, tmp_path: Path) -> None:
    """The router is not quantised."""
    config, quantise, _ = FORMS[name]
    options = (("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 128))
    shape = dataclasses.replace(SHAPE, architecture="qwen3_moe", layers=1, options=options)
    found = publish(tmp_path, config, quantise, shape)
    model = load(found.directory)
    assert_near(logits_of(model), meant(found), share)
    assert model.num_parameters == load(found.meant).num_parameters


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_biases_and_head_norms_stay_what_they_are(architecture: str, tmp_path: Path) -> None:
    found = publish(tmp_path, AWQ, published.awq, dataclasses.replace(SHAPE, architecture=architecture, tied=True))
    assert_near(logits_of(load(found.directory)), meant(found), 0.05)


def test_in_bfloat16_too(tmp_path: Path) -> None:
    found = publish(tmp_path, *FORMS["gptq"][:2])
    assert_near(logits_of(load(found.directory, torch.bfloat16)), meant(found), 0.1)


def test_a_layer_that_was_left_out_is_taken_as_it_is(tmp_path: Path) -> None:
    """One of three fused projections is not quantised; in another layer none is."""
    found = publish(tmp_path, AWQ, published.awq)
    path = found.directory / "model.safetensors"
    weights, plain = load_file(path), load_file(found.meant / "model.safetensors")
    for name in ("layers.0.self_attn.k_proj", "layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"):
        for end in ("qweight", "qzeros", "scales"):
            weights.pop(f"model.{name}.{end}")
        weights[f"model.{name}.weight"] = plain[f"model.{name}.weight"]
    save_file(weights, path)
    assert_near(logits_of(load(found.directory)), meant(found), 0.05)


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16"])
def test_groups_need_not_divide_the_inputs(name: str, tmp_path: Path) -> None:
    """192 inputs in groups of 128: the last one has 64."""
    config, quantise, _ = FORMS[name]
    found = publish(tmp_path, config, quantise, dataclasses.replace(SHAPE, intermediate=192))
    model = load(found.directory)
    assert ROUNDS in model.notes[0] and len(model.notes) == 1
    assert_near(logits_of(model), meant(found), 0.1)


def test_experts_in_floats_of_4_bits(tmp_path: Path) -> None:
    """As gpt-oss is published; levels of 8 bits hold their weights without rounding."""
    options = (("num_local_experts", 4), ("num_experts_per_tok", 2), ("sliding_window", 10))
    shape = Shape("gpt_oss", hidden=64, head_dim=32, intermediate=96, options=options)
    found = published.publish_mxfp4(tmp_path, shape)
    kept = [dequantise(packed) for packed in read_experts_of(found.directory, 64, 192)]
    wanted = load_file(found.meant / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(torch.stack(kept), wanted.transpose(1, 2))
    model = load(found.directory)
    assert ROUNDS in model.notes[0] and len(model.notes) == 1
    assert_near(logits_of(model), meant(found), 0.1)
    assert model.num_parameters == load(found.meant).num_parameters


def read_experts_of(directory: Path, width: int, rows: int) -> Sequence[Packed]:
    source = Checkpoint(directory, torch.float32, CPU, StoredForm("mxfp4", 32))
    found = source.stored_experts("model.layers.0.mlp.experts.gate_up_proj", (4, rows, width))
    assert found is not None
    return found


def test_an_engine_says_what_it_serves_and_rounds_nothing_twice(tmp_path: Path) -> None:
    found = publish(tmp_path, *FORMS["gptq"][:2], dataclasses.replace(SHAPE, layers=1))
    config, model = EngineConfig(device="cpu", dtype="float32", kv_cache_tokens=256), read_config(found.directory)
    built = build_engine(config, model, found.directory, limits_of(config, model, 1 << 20))
    assert built.computing.quantization == "gptq"
    assert any("activations rounded to 8 bits" in note for note in built.computing.notes)
    built.engine.add(EngineRequest("a", tuple(IDS), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)))
    tokens: list[int] = []
    while built.engine.has_work:
        tokens += [token for event in built.engine.step().sampled for token in event.token_ids]
    assert len(tokens) == 3
    twice = dataclasses.replace(config, quantization="int4")
    with pytest.raises(ServiceError, match="--quantization: int4: the checkpoint is quantised already, with gptq"):
        build_engine(twice, model, found.directory, limits_of(config, model, 1 << 20))


def test_a_plan_is_of_what_weights_stand_for(tmp_path: Path) -> None:
    found = publish(tmp_path, AWQ, published.awq)
    plan = plan_model(read_config(found.directory), torch.bfloat16)
    assert plan.num_parameters == load(found.meant).num_parameters
