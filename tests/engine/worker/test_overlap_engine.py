"""A whole engine with steps in flight gives the outputs of one without: all kinds of requests, under pressure."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import OutOfDeviceMemory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.speculation.ngram import NgramProposer
from sluice_server.engine.worker.launched import LaunchedStep
from sluice_server.engine.worker.overlapped import OverlappedRunner, overlap
from sluice_server.engine.worker.recorded_steps import InFlightDrafts
from sluice_server.engine.worker.runner import CompletedStep, Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.staging import StagedTokens
from sluice_server.engine.worker.step_numbers import UniformRows
from sluice_server.kernels import gpu
from tests.engine.test_engine_oracle import GEMMA2, some_prompts
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.oracle.checkpoints import Shape, greedy, make_checkpoint, reference

CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    threads=1,
    max_num_seqs=5,
    max_num_batched_tokens=24,
    draft_length="fixed",
    max_draft_tokens=3,
)
BLOCKS = 18  # fewer than five sequences need: preemption is common
LENGTH = 48
PLAIN: list[dict[str, Any]] = [{}, {"n": 2}]
MIXED: list[dict[str, Any]] = [
    *PLAIN,
    {"min_tokens": 4},
    {"logprobs": 2},
    {"presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"best_of": 2},
    {"beam_width": 2, "temperature": 0.0},
    {"logit_bias": ((5, 2.0),)},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape(kv_heads=1))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)


def load(checkpoint: Path) -> Model:
    return load_model(checkpoint, read_config(checkpoint), torch.float32, torch.device("cpu"), LENGTH)


def make(checkpoint: Path, model: Model, *, is_overlapped: bool, drafts: bool = False, blocks: int = BLOCKS) -> Engine:
    config = dataclasses.replace(CONFIG, speculation="ngram" if drafts else "none", max_model_len=LENGTH)
    store = BlockStore(model.new_cache(blocks, config.block_size))
    runner: Any = Runner(model, store, config.block_size, config.max_num_seqs, LENGTH)
    if is_overlapped:
        slots = Slots(config.max_num_seqs, LENGTH, config.block_size, config.max_num_batched_tokens)
        runner = overlap(runner, model, store, HostDevice(), slots, InFlightDrafts((3,) if drafts else ()))
    limits = limits_of(config, read_config(checkpoint), 1 << 20)
    scheduler = Scheduler(
        KVCache(blocks, config.block_size, prefix_caching=True),
        limits,
        (7,),
        config.max_num_seqs,
        24,
        settings_of(config),
    )
    return Engine(scheduler, runner, proposer=NgramProposer() if drafts else None)


def requests(seed: int, kinds: list[dict[str, Any]]) -> list[EngineRequest]:
    """Requests of these kinds, some with credit."""
    rng = random.Random(seed)
    found = []
    for i in range(9):
        prefix = [3, 4, 3, 4, 5, 6, 3, 4] * rng.randrange(3)
        prompt = (*prefix, *(rng.randrange(8, 40) for _ in range(rng.randrange(1, 12))))
        options = {"max_tokens": rng.randrange(4, 18), "temperature": rng.choice((0.0, 1.0)), "seed": i}
        params = SamplingParams(**{**options, "ignore_eos": rng.random() < 0.5, **rng.choice(kinds)})
        credit = rng.randrange(1, 4) if rng.random() < 0.2 and not params.is_search else None
        found.append(EngineRequest(f"{i}", prompt, params, priority=rng.choice((0, 3)), credit=credit))
    return found


def run(engine: Engine, seed: int, kinds: list[dict[str, Any]] = PLAIN) -> dict[tuple[str, int], tuple[list[int], str]]:
    """Tokens and end of each output; requests arrive, pause and go on."""
    rng, waiting = random.Random(seed), requests(seed, kinds)
    out: dict[tuple[str, int], tuple[list[int], str]] = {}
    owed = {one.request_id for one in waiting if one.credit is not None}
    for _ in range(2000):
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            ids, _ = out.setdefault((event.request_id, event.output_index), ([], ""))
            ids += event.token_ids
            out[event.request_id, event.output_index] = ids, str(event.finish or "")
        for name in list(owed):
            if name in engine.scheduler._state.groups and rng.random() < 0.3:
                engine.grant(name, 2)
        if not waiting and not engine.scheduler.num_open and not engine.has_work:
            break
    engine.scheduler.check()
    assert engine.scheduler.cache.pool.num_held == 0 and not waiting
    return out


@pytest.mark.parametrize(
    ("seed", "kinds", "drafts"),
    [
        pytest.param(1, PLAIN, False, id="plain"),
        pytest.param(2, MIXED, False, id="mixed"),
        pytest.param(3, MIXED, True, id="drafts"),
        *(pytest.param(seed, MIXED, seed % 2 > 0, id=f"{seed}", marks=pytest.mark.long) for seed in range(4, 20)),
    ],
)
def test_the_same_tokens_and_ends_as_without_overlap(
    checkpoint: Path, seed: int, kinds: list[dict[str, Any]], drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ahead = load(checkpoint), Counted(Scheduler.plan_ahead)
    blocks = 80 if kinds is PLAIN else BLOCKS
    own = make(checkpoint, model, is_overlapped=True, drafts=drafts, blocks=blocks)
    monkeypatch.setattr(Scheduler, "plan_ahead", lambda *given: ahead(*given))
    found = run(own, seed, kinds)
    assert found == run(make(checkpoint, model, is_overlapped=False, drafts=drafts), seed, kinds)
    assert all(finish for _, finish in found.values())
    assert kinds is MIXED or ahead.num >= 10
    assert kinds is PLAIN or seed > 3 or own.scheduler.num_preemptions > 0


class Counted:
    """Counts how often a call returned something."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.num = 0

    def __call__(self, *given: object) -> object:
        found = self._call(*given)
        self.num += found is not None
        return found


def test_the_same_tokens_as_transformers_of_a_model_with_caps(tmp_path: Path) -> None:
    """Norms on both sides, soft caps, and windows in some layers; in chunks, recorded steps and drafts."""
    made = make_checkpoint(tmp_path, Shape("gemma2", tied=True, options=GEMMA2))
    own = make(made, load(made), is_overlapped=True, drafts=True)
    oracle, prompts = reference(made), some_prompts(111, 4)
    prompts = {name: prompt[:30] for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        own.add(EngineRequest(name, tuple(prompt), params))
    found: dict[str, list[int]] = {name: [] for name in prompts}
    while own.has_work:
        events = own.step()
        assert not events.failed
        for event in events.sampled:
            found[event.request_id] += event.token_ids
    assert found == {name: greedy(oracle, prompt, 12) for name, prompt in prompts.items()}


@pytest.mark.parametrize("at", ["launch", "collect"])
@pytest.mark.parametrize("error", [OutOfDeviceMemory, ValueError])
def test_a_step_that_fails_is_computed_again_and_with_it_what_rests_on_it(
    checkpoint: Path, at: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third uniform step of several rows fails."""
    model = load(checkpoint)
    expected = run(make(checkpoint, model, is_overlapped=False, drafts=False), 4)
    own = make(checkpoint, model, is_overlapped=True, drafts=False)
    launch, collect, calls = OverlappedRunner._launch, LaunchedStep.collect, [0]

    def fails(num_rows: int) -> bool:
        calls[0] += num_rows > 1
        return num_rows > 1 and calls[0] % 3 == 0

    def launched(self: OverlappedRunner, plan: StepPlan, rows: UniformRows) -> LaunchedStep | CompletedStep:
        if fails(len(plan.slots)):
            raise error
        return launch(self, plan, rows)

    def collected(self: LaunchedStep) -> Any:  # noqa: ANN401 # a result
        if fails(len(self._plan.slots)):
            raise error
        return collect(self)

    monkeypatch.setattr(
        *(OverlappedRunner, "_launch", launched) if at == "launch" else (LaunchedStep, "collect", collected)
    )
    assert run(own, 4) == expected
    assert calls[0] >= 3


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_device_that_runs_out_of_memory_takes_smaller_steps_from_then_on(
    checkpoint: Path, is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request fails, and a size that did not fit is not tried again and again."""
    model, most, refused = load(checkpoint), 7, list[int]()
    expected = run(make(checkpoint, model, is_overlapped=False), 5)
    own = make(checkpoint, model, is_overlapped=is_overlapped)
    kind, name = (StagedTokens, "stage") if is_overlapped else (Runner, "_compute")
    compute: Callable[..., Any] = getattr(kind, name)

    def computed(self: object, plan: StepPlan, *more: object, **named: object) -> object:
        if plan.num_tokens > most:
            refused.append(plan.num_tokens)
            raise torch.OutOfMemoryError
        return compute(self, plan, *more, **named)

    monkeypatch.setattr(kind, name, computed)
    assert run(own, 5) == expected
    assert refused and max(refused) > 2 * most and own.scheduler._planner.budget <= most
    refused.clear()
    run(own, 5)
    assert not refused
