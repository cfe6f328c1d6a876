"""A whole engine on the Triton kernels, interpreted: the same tokens as on the CPU's own, chunks, batches and all; and
likely ones in number formats that only a GPU has."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.kernels import gpu, ops
from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.layout.slots import GPU_ALIGN
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=8, kv_cache_tokens=256, threads=1, max_num_batched_tokens=24
)
PROMPTS = {"short": tuple(range(1, 4)), "long": tuple(range(1, 27))}
MISSED = 0.3  # of the largest logit's size: what rounding may take for the most likely


def build(directory: Path) -> BuiltEngine:
    config = read_config(directory)
    return build_engine(CONFIG, config, directory, limits_of(CONFIG, config, 1 << 20))


def tokens(built: BuiltEngine) -> dict[str, list[int]]:
    """Greedy tokens of two prompts at once, one of which takes two chunks."""
    engine = built.engine
    for name, prompt in PROMPTS.items():
        engine.add(EngineRequest(name, prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)))
    out: dict[str, list[int]] = {"short": [], "long": []}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for one in events.sampled:
            out[one.request_id] += one.token_ids
    return out


QWEN = Shape("qwen3", layers=1, head_dim=32, kv_heads=1)
WINDOWED = Shape("mistral", layers=1, options=(("sliding_window", 10),))
EXPERTS = Shape(
    "qwen3_moe",
    layers=1,
    kv_heads=1,
    options=(("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40)),
)
SINKS = Shape("gpt_oss", layers=2, kv_heads=1, options=(("num_local_experts", 4), ("sliding_window", 10)))
CAPPED = Shape("gemma2", layers=1, tied=True, options=(("attn_logit_softcapping", 3.0), ("sliding_window", 10)))
SHARED = Shape(
    "qwen2_moe",
    layers=1,
    kv_heads=1,
    options=(*EXPERTS.options, ("shared_expert_intermediate_size", 24)),
)
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LATER = {
    "qwen3": QWEN,
    "mistral": WINDOWED,
    "olmo2": Shape("olmo2", layers=1),
    "phi3": Shape("phi3", layers=1, hidden=64, options=(("rope_parameters", PARTIAL),)),
    "smollm3": Shape("smollm3", layers=2, options=(("no_rope_layers", [0, 1]),)),
}
SHAPES = {"gemma2": CAPPED, **LATER}
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in LATER else name for name in SHAPES]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_as_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[name])
    want = tokens(build(directory))
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    assert tokens(build(directory)) == want


@pytest.mark.long
@pytest.mark.parametrize(("shape", "weights"), [(EXPERTS, ""), (EXPERTS, "int8"), (SINKS, ""), (SHARED, "")])
def test_experts_are_multiplied_all_at_once(
    shape: Shape, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, shape)
    want = tokens(build(directory))
    as_on_a_gpu(monkeypatch, Formats(torch.float32, weights, torch.float32))
    calls = Calls(ops.experts_mlp)
    monkeypatch.setattr(ops, "experts_mlp", calls)
    found = tokens(build(directory))
    assert calls.num and calls.last[1].weight.dtype is (torch.int8 if weights else torch.float32)
    assert weights or found == want


class Calls:
    """Counts the calls of a function and keeps their arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.num = 0
        self.last: tuple[Any, ...] = ()

    def __call__(self, *given: object, **named: object) -> object:
        self.num, self.last = self.num + 1, given
        return self._call(*given, **named)


@pytest.mark.parametrize("weights", ["int4", "w8a8", "fp8"])
def test_experts_in_a_format_without_a_kernel_are_refused(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, EXPERTS)
    as_on_a_gpu(monkeypatch, Formats(torch.float32, weights, torch.float32))
    with pytest.raises(
        ServiceError, match=r"this number format of experts .* take --quantization none or int8"
    ) as found:
        build(directory)
    assert (found.value.code, found.value.field) == (Code.UNIMPLEMENTED, "quantization")


@torch.inference_mode()
@pytest.mark.parametrize(
    ("weights", "cache", "kept"),
    [pytest.param("w8a8", torch.int8, "int8", marks=pytest.mark.long), ("fp8", torch.float8_e4m3fn, "fp8")],
)
def test_8_bits_on_both_sides_and_in_the_cache(
    weights: str, cache: torch.dtype, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, QWEN)
    as_on_a_gpu(monkeypatch, Formats(torch.float32, weights, cache))
    built = build(directory)
    assert (built.computing.quantization, built.computing.cache_dtype) == (weights, kept)
    runner = built.engine.runner
    assert isinstance(runner, Runner)
    (layer,) = runner._store.cache
    assert layer.dtype is cache and layer.stride(1) % GPU_ALIGN == 0
    model = reference(directory)
    for name, found in tokens(built).items():
        logits = model(torch.tensor([[*PROMPTS[name], *found]])).logits[0, len(PROMPTS[name]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert (logits.amax(1) - chosen <= MISSED * logits.abs().amax(1)).all()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, formats: Formats) -> None:
    """Chooses for CPU tensors what is chosen for a GPU, whose kernels are interpreted over them."""
    cuda = torch.device("cuda")
    table = {
        name: tuple(dataclasses.replace(kind, fits=lambda _: True) for kind in kinds.KINDS[name] if kind.fits(cuda))
        for name in kinds.KINDS
    }
    monkeypatch.setattr(kinds, "KINDS", table)
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr("sluice_server.engine.build_model.choose_formats", lambda *_: formats)
