"""Published quantised checkpoints: logits of what their weights mean, on CPU and on the GPU's kernels, interpreted; and
what is not supported, refused by field, value and what is."""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
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
from sluice_server.engine.models.config import read_config, read_head_config
from sluice_server.engine.models.layers import decoder as layers
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.model import Model, load_model, plan_model
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
from tests.oracle.checkpoints import make_checkpoint, reference
from tests.oracle.published import AWQ, FBGEMM, GPTQ, SHAPE, Published, compressed, publish

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = [5, 9, 77, 3, 40, 41, 8]
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
ROUNDS = "activations rounded to 8 bits"
FORMS: dict[str, tuple[dict[str, Any], Quantise, str]] = {
    "awq": (AWQ, published.awq, ROUNDS),
    "awq-32": ({**AWQ, "group_size": 32}, functools.partial(published.awq, group=32), ROUNDS),
    "awq-one": ({**AWQ, "group_size": -1}, functools.partial(published.awq, group=-1), ROUNDS),
    "gptq": (GPTQ, published.gptq, ROUNDS),
    "gptq-zeros": ({**GPTQ, "sym": False}, functools.partial(published.gptq, symmetric=False), ROUNDS),
    "fbgemm": (FBGEMM, published.fp8, "multiplies no fp8"),
    "channel": (compressed("channel"), published.fp8, "multiplies no fp8"),
    "tensor": (compressed("tensor"), functools.partial(published.fp8, per_row=False, shape=(1,)), "no fp8"),
    "scalar": (compressed("tensor"), functools.partial(published.fp8, per_row=False, shape=()), "no fp8"),
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
    """Interpreted, over CPU tensors."""
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
    """Weights are kept as on a GPU of that compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(layers, "stored_kind", lambda packed, device: kinds.stored_kind(packed, CUDA))


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PackedLinear, Tensor]]:
    """Layers made of weights that came quantised, and what these mean."""
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
    """Their router is what nobody quantises."""
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
    """Of three projections in one product one is not quantised; and in another layer none."""
    found = publish(tmp_path, AWQ, published.awq)
    path = found.directory / "model.safetensors"
    weights, plain = load_file(path), load_file(found.meant / "model.safetensors")
    for name in ("layers.0.self_attn.k_proj", "layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"):
        for end in ("qweight", "qzeros", "scales"):
            weights.pop(f"model.{name}.{end}")
        weights[f"model.{name}.weight"] = plain[f"model.{name}.weight"]
    save_file(weights, path)
    assert_near(logits_of(load(found.directory)), meant(found), 0.05)


REFUSED: list[tuple[str, str, object, str]] = [
    (
        "awq",
        "quant_method",
        "bitsandbytes",
        "quant_method is 'bitsandbytes'; supported are awq, compressed-tensors, fb",
    ),
    ("awq", "quant_method", "fp8", "quant_method is 'fp8'; supported are awq"),
    ("awq", "quant_method", None, "quant_method is None"),
    ("awq", "bits", 8, r"quantization_config\.bits is 8; supported is 4"),
    ("awq", "bits", True, "bits is True; supported is 4"),
    ("awq", "group_size", 256, "group_size is 256; supported are 32, 64, 128, -1"),
    ("awq", "version", "gemv", "version is 'gemv'; supported are 'gemm', 'GEMM'"),
    ("awq", "zero_point", False, "zero_point is False; supported is True"),
    ("gptq", "bits", 3, "bits is 3; supported is 4"),
    ("gptq", "desc_act", True, "desc_act is True; supported is False"),
    ("gptq", "checkpoint_format", "gptq_v2", "checkpoint_format is 'gptq_v2'; supported is 'gptq'"),
    ("gptq", "format", "marlin", "format is 'marlin'; supported is 'gptq'"),
    ("gptq", "lm_head", True, "lm_head is True; supported is False"),
    ("gptq", "dynamic", {"-:.*mlp.*": {}}, "dynamic is .*; supported are None, {}"),
    ("channel", "format", "pack-quantized", "format is 'pack-quantized'; supported is 'float-quantized'"),
    ("channel", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is .*; supported is None"),
    ("channel", "config_groups", {}, "config_groups has 0 groups; supported is 1"),
    ("channel", "config_groups.group_0.targets", ["re:.*"], r"config_groups\.group_0\.targets is .*'Linear'"),
    ("channel", "config_groups.group_0.weights.num_bits", 4, r"group_0\.weights\.num_bits is 4; supported is 8"),
    ("channel", "config_groups.group_0.weights.strategy", "block", "strategy is 'block'; .* 'tensor', 'channel'"),
    ("channel", "config_groups.group_0.input_activations", None, "input_activations is None; it must be an object"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """config.json of a checkpoint that nobody has quantised."""
    return (make_checkpoint(tmp_path_factory.mktemp("plain"), SHAPE) / "config.json").read_text()


@pytest.mark.parametrize(("form", "field", "value", "said"), REFUSED)
def test_what_is_not_supported_is_refused(
    form: str, field: str, value: object, said: str, tmp_path: Path, plain: str
) -> None:
    """Before a weight is read. A name with dots is of what is within."""
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
        ("g_idx", whole[f"{name}.g_idx"].flip(0) + torch.arange(128).int(), "desc_act are not supported"),
        ("qweight", whole[f"{name}.qweight"][:8], r"has shape \[8, 128\]; config\.json implies \[16, 128\]"),
        ("scales", whole[f"{name}.scales"].double(), "has dtype torch.float64; config.json implies torch.float16 or"),
        ("qzeros", None, f"no safetensors file holds the tensor {name}.qzeros"),
    ):
        changed = {key: value for key, value in whole.items() if key != f"{name}.{end}"}
        save_file(changed if tensor is None else {**changed, f"{name}.{end}": tensor}, path)
        with pytest.raises(ServiceError, match=said):
            load(found.directory)


def test_sizes_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    found = publish(tmp_path, {**AWQ, "group_size": 64}, functools.partial(published.awq, group=64))
    with pytest.raises(ServiceError, match="down_proj: 128 x 192: rows of 8 n and inputs of 128 n are supported"):
        Checkpoint(found.directory, torch.float32, CPU, StoredForm("awq", 128)).stored(
            "model.layers.0.mlp.down_proj", 128, 192
        )


def test_float8_without_its_scales_is_refused(tmp_path: Path) -> None:
    found = publish(tmp_path, FBGEMM, published.fp8, dataclasses.replace(SHAPE, layers=1))
    path = found.directory / "model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if "weight_scale" not in name}, path)
    with pytest.raises(ServiceError, match=r"is torch\.float8_e4m3fn, and .*quantization_config names no scales"):
        load(found.directory)


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


def test_a_quantised_head_that_drafts_is_refused(plain: str, tmp_path: Path) -> None:
    text = {**json.loads(plain), "num_hidden_layers": 1, "quantization_config": AWQ}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ServiceError, match="quant_method is 'awq'; an EAGLE-3 head must not be quantised"):
        read_head_config(tmp_path)


def test_a_plan_is_of_what_weights_stand_for(tmp_path: Path) -> None:
    found = publish(tmp_path, AWQ, published.awq)
    plan = plan_model(read_config(found.directory), torch.bfloat16)
    assert plan.num_parameters == load(found.meant).num_parameters
