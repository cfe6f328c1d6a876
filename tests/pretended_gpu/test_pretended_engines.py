"""The whole GPU branch of an engine on a pretended device: the tokens of transformers, recorded and computed."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.plan import IN_FLIGHT, StepPlan
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.overlapped import OverlappedRunner
from sluice_server.engine.worker.recorded_passes import RecordedPasses
from sluice_server.engine.worker.runner import Runner
from tests.gpu.computed import computes_each_step
from tests.oracle.checkpoints import Shape, greedy, make_checkpoint, reference
from tests.oracle.heads import make_head
from tests.pretended_gpu.cuda import pretend

CONFIG = EngineConfig(
    device="cuda",
    dtype="float32",
    block_size=8,
    kv_cache_tokens=192,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=96,
)
LLAMA = Shape("llama", 61, 32, 1, 2, 1, 64, 48)
EXPERTS = (("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 24))
SHAPES = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, architecture="qwen3"),
    "experts": dataclasses.replace(LLAMA, architecture="qwen3_moe", options=EXPERTS),
}
PROMPTS = {"long": tuple(range(1, 24)), "short": (9,) * 6}
NUM = 4
WITH_DRAFTS, MANY = 7, 12
EIGHT_BITS, INVARIANT = {"kv_cache_dtype": "int8"}, {"batch_invariant": True, "prefix_caching": False}
LOOK_UP = {"speculation": "ngram", "draft_length": "fixed", "max_draft_tokens": 2}
W8A16 = {"quantization": "int8"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3, W8A16, look-up": ("qwen3", {**W8A16, **LOOK_UP}),
    "qwen3": ("qwen3", {}),
    "experts": ("experts", {}),
    "experts, W8A16": ("experts", W8A16),
    "llama, int8 cache": ("llama", EIGHT_BITS),
    "llama, W8A16": ("llama", W8A16),
    "llama, look-up": ("llama", LOOK_UP),
    "llama, batch-invariant": ("llama", INVARIANT),
    "qwen3, batch-invariant, W8A16": ("qwen3", {**INVARIANT, **W8A16}),
}
QUICK = 2


def build(directory: Path, draft: Path | None = None, **changes: Any) -> Engine:  # noqa: ANN401 # of settings' types
    """An engine on the device."""
    config, model = dataclasses.replace(CONFIG, **changes), read_config(directory)
    return build_engine(config, model, directory, limits_of(config, model, 1 << 20), draft).engine


def run(engine: Engine, prompts: dict[str, tuple[int, ...]] = PROMPTS, **params: Any) -> dict[str, list[int]]:  # noqa: ANN401
    """Tokens of prompts at once; greedy by default."""
    given = SamplingParams(**{"max_tokens": NUM, "temperature": 0.0, "ignore_eos": True, **params})
    found: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        found[name] = []
        engine.add(EngineRequest(name, prompt, given))
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            found[event.request_id] += event.token_ids
    return found


def wanted(directory: Path, num: int) -> dict[str, list[int]]:
    """The same according to transformers."""
    model = reference(directory)
    return {name: greedy(model, list(prompt), num) for name, prompt in PROMPTS.items()}


def checkpoint(directory: Path, shape: Shape) -> Path:
    """A checkpoint whose weights int8 represents with one scale for each row, so that to round them changes nothing."""
    path = make_checkpoint(directory, shape) / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") and tensor.shape[0] == shape.hidden:
            tensor.fill_(1.0)  # it is folded into the weights behind it
        elif tensor.dim() == 2:
            scales = tensor.abs().amax(1, keepdim=True) / 127
            tensor.copy_((tensor / scales).round() * scales)
    save_file(tensors, path, {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i < QUICK else pytest.mark.long) for i, name in enumerate(CASES)]
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, decoding in recorded steps, of two rows at once."""
    shape, changes = CASES[name]
    directory = checkpoint(tmp_path, SHAPES[shape])
    with pretend() as gpu:
        engine = build(directory, **changes)
        assert isinstance(engine.runner, OverlappedRunner)
        num = WITH_DRAFTS if "look-up" in name else NUM
        found = run(engine, max_tokens=num)
    assert found == wanted(directory, num) and gpu.replays > 0
    assert "look-up" not in name or engine.scheduler.draft_stats.num_accepted > 0


@pytest.mark.long
@pytest.mark.parametrize("speculation", ["draft", "eagle"])
def test_drafts_are_made_in_recorded_passes(tmp_path: Path, speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a drafter launches beside graphs, only the reading of prompts and sampling is left."""
    shape = dataclasses.replace(LLAMA, layers=3) if speculation == "eagle" else LLAMA
    directory = make_checkpoint(tmp_path, shape)
    (head := tmp_path / "head").mkdir()
    draft = make_head(head, shape) if speculation == "eagle" else directory
    settings: dict[str, Any] = {
        "speculation": speculation,
        "draft_model": "x",
        "draft_length": "fixed",
        "max_draft_tokens": 3,
    }
    launched = list[Counter[str]]()
    found = list[dict[str, list[int]]]()
    for is_recorded in (True, False):
        if not is_recorded:
            monkeypatch.setattr(RecordedPasses, "compute", lambda self, one: self._computed.compute(one))
        with pretend() as gpu:
            engine = build(directory, draft, **settings)
            before = gpu.launches.copy()
            found.append(run(engine, max_tokens=MANY))
            launched.append(gpu.launches - before)
            assert engine.scheduler.draft_stats.num_drafted > 0
    assert found[0] == found[1] == wanted(directory, MANY)
    recorded, computed = (one["kv_write_kernel"] for one in launched)
    assert recorded < computed / 2, launched


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recorded_step_equals_a_computed_one(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, LLAMA)
    with pretend() as gpu:
        recorded = run(build(directory, prefix_caching=False), temperature=temperature, seed=3)
        assert gpu.replays
    computes_each_step(monkeypatch)
    with pretend(seed=1) as gpu:
        assert run(build(directory, prefix_caching=False), temperature=temperature, seed=3) == recorded
        assert not gpu.replays


@pytest.mark.long
def test_the_host_does_not_wait_in_steady_decode(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, LLAMA)
    with pretend() as gpu:
        engine = build(directory)
        engine.add(EngineRequest("a", PROMPTS["long"], SamplingParams(max_tokens=24, ignore_eos=True, seed=1)))
        for _ in range(4):
            engine.step()
        start = len(PROMPTS["long"]) + 3
        torch.cuda.set_sync_debug_mode("error")
        plans = [StepPlan(9, [0], [1], [start + i], [IN_FLIGHT if i else 5], [True], [], []) for i in range(2)]
        pending = [engine.runner.launch(plan) for plan in plans]
        torch.cuda.set_sync_debug_mode("default")
        launched = gpu.launches.total()
        assert all(one.collect().token_ids[0] >= 0 for one in pending)
        assert gpu.launches.total() == launched


@pytest.mark.long
def test_tokens_do_not_depend_on_company_where_that_was_asked(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, LLAMA)
    with pretend():
        engine = build(directory, None, **INVARIANT)
        together = run(engine, temperature=1.0, seed=5)
        for name, prompt in PROMPTS.items():
            assert run(engine, {name: prompt}, temperature=1.0, seed=5) == {name: together[name]}


MIXED: list[dict[str, Any]] = [
    *({}, {"logprobs": 1}, {}, {"presence_penalty": 0.5}, {}, {"logit_bias": ((5, 2.0),)}, {}, {"min_tokens": 2}, {}),
    {"bad_token_ids": (3, 4)},
]


@pytest.mark.long
def test_steps_of_mixed_traffic_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady arrivals, prompts in parts beside decodes, half of the requests with more than sampling: each forward pass
    and its logits are a graph, and what is launched beside graphs samples, whatever the number of layers."""
    directory = make_checkpoint(tmp_path, LLAMA)
    plain = list[StepPlan]()
    monkeypatch.setattr(Runner, "_compute", lambda self, plan, images: plain.append(plan))
    with pretend() as gpu:
        engine = build(directory)
        before, waiting = gpu.launches.copy(), list(enumerate(MIXED))
        while waiting or engine.has_work:
            if waiting:
                i, params = waiting.pop()
                prompt = tuple(range(1 + i, 12 + 2 * i))
                engine.add(EngineRequest(f"{i}", prompt, SamplingParams(max_tokens=4, ignore_eos=True, **params)))
            assert not engine.step().failed
        launched = gpu.launches - before
    assert not plain and gpu.replays > 10
    assert not {"attention_split_kernel", "attention_prefill_kernel", "kv_write_kernel", "gate_kernel"} & set(launched)
