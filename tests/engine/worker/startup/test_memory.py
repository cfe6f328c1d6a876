"""The share of a GPU's memory that is left for the cache, and the option that is named where there is none."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sluice_server.engine import build
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import DeviceLost, ServiceError
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape
from sluice_server.engine.worker.overlapped import OverlappedRunner, overlap
from sluice_server.engine.worker.recorded_steps import InFlightDrafts, recorded_bytes
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.startup import allocation, memory
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.engine.worker.startup.memory import at_start, cache_bytes
from sluice_server.engine.worker.steps import RecordedStep, UniformSteps
from sluice_server.kernels import gpu
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.oracle.checkpoints import Shape, make_checkpoint

GIB = 1 << 30


def test_the_cache_gets_what_weights_steps_and_others_leave() -> None:
    assert cache_bytes(80 * GIB, 80 * GIB, 20 * GIB, 0, 0.9) == 52 * GIB
    assert cache_bytes(80 * GIB, 70 * GIB, 20 * GIB, 3 * GIB, 0.9) == 39 * GIB


@pytest.mark.parametrize(("available", "peak", "recorded"), [(80, 72, 0), (20, 15, 0), (80, 60, 12)])
def test_no_room_names_the_option(available: int, peak: int, recorded: int) -> None:
    said = rf"--gpu-memory-utilization: 0\.9 of 81920 MiB.* {recorded * 1024} MiB of recorded steps; raise it"
    with pytest.raises(ServiceError, match=said):
        cache_bytes(80 * GIB, available * GIB, peak * GIB, recorded * GIB, 0.9)


class Pooled(HostDevice):
    """A device whose graphs share one pool, as large as the largest of them; each adds a little of its own."""

    POOL, EACH = 1000, 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = 0
        self.next = GraphKey(0, 0)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        size = self.next.num_rows * self.next.per_row * self.POOL
        self.bytes += max(0, size - self.pool) + self.EACH
        self.pool = max(self.pool, size)
        return super().capture(body)


def watch(device: Pooled, monkeypatch: pytest.MonkeyPatch) -> list[GraphKey]:
    """Reports to the device what is recorded; returns the keys in order."""
    keys: list[GraphKey] = []
    record = UniformSteps.record

    def recording(self: UniformSteps, key: GraphKey) -> RecordedStep:
        keys.append(key)
        device.next = key
        return record(self, key)

    monkeypatch.setattr(UniformSteps, "record", recording)
    return keys


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    directory = make_checkpoint(tmp_path, Shape(kv_heads=1))
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)
    return load_model(directory, read_config(directory), torch.float32, torch.device("cpu"), 64)


@pytest.mark.parametrize(
    "drafts", [InFlightDrafts(()), InFlightDrafts((1, 3), may_branch=True)], ids=["decode", "trees"]
)
def test_recorded_steps_take_what_was_said_before_there_was_a_cache(
    model: Model, drafts: InFlightDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes steps that are recorded while idle. Few are recorded for the estimate."""
    slots = Slots(20, 64, 8)
    device = Pooled()
    keys = watch(device, monkeypatch)
    expected = recorded_bytes(model, torch.float32, device, slots, drafts)
    forms = len(drafts.lengths) + 1 + (1 if drafts.may_branch else 0) + 1  # plain, drafts, trees, shared
    assert [key.num_rows for key in keys[:forms]] == [20] * forms and len(keys) == forms + 4
    keys.clear()
    store, real = BlockStore(model.new_cache(8, 8)), Pooled()
    watch(real, monkeypatch)
    runner = overlap(Runner(model, store, 8, 20, 64), model, store, real, slots, drafts)
    while runner.idle():
        continue
    assert real.bytes == expected > real.pool
    assert isinstance(runner, OverlappedRunner)


def test_one_dear_step_among_the_samples_is_believed() -> None:
    costs = {GraphKey(8, 1): 100, GraphKey(4, 1): 0, GraphKey(2, 1): 5, GraphKey(1, 1): 1}
    taken = [0]

    def capture(key: GraphKey) -> GraphKey:
        taken[0] += costs[key]
        return key

    assert Graphs(8, [(1, RowShape.PLAIN)], capture).bytes_of_all(lambda: taken[0]) == 100 + 3 * 5
    taken[0] = 50
    assert Graphs(1, [(1, RowShape.PLAIN)], lambda key: key).bytes_of_all(lambda: taken[0]) == 0


def test_memory_that_is_missing_at_start_names_a_flag_and_other_faults_do_not() -> None:
    said = "--max-num-seqs: no memory for steps; lower it, or use a device with more"
    with pytest.raises(ServiceError, match=said) as refused, at_start("--max-num-seqs", "steps; lower it"):
        raise torch.OutOfMemoryError
    assert refused.value.field == "max_num_seqs"
    with pytest.raises(DeviceLost), at_start("--x", "y"):
        raise torch.AcceleratorError
    with pytest.raises(ValueError, match="z"), at_start("--x", "y"):
        raise ValueError("z")


CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=8, kv_cache_tokens=512, threads=1, max_num_seqs=4
).sized("cpu")


def full(*arguments: object, **named: object) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (
            "build_model.load_model",
            "--model: .* weights in float32; try --quantization int4, or --weights-offload-bytes, or use a",
        ),
        ("models.model.Model.new_cache", r"--kv-cache-tokens: .* for a cache of \d+ MiB; set --kv-cache-tokens lower"),
    ],
)
def test_weights_or_a_cache_that_do_not_fit_name_their_option(
    where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, Shape(kv_heads=1))
    config = read_config(directory)
    monkeypatch.setattr(f"sluice_server.engine.{where}", full)
    with pytest.raises(ServiceError, match=said):
        build.build_engine(CONFIG, config, directory, limits_of(CONFIG, config, 1 << 20))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("recorded_bytes", "--max-num-seqs: .* for recorded steps of 4 rows beside the weights; lower it, or use a"),
        ("cuda_cache_bytes", "--max-num-batched-tokens: .* for a step of 512 tokens beside the weights; lower it"),
        ("overlap", "--gpu-memory-utilization: .* for recorded steps of 4 rows beside the cache; lower it"),
    ],
)
def test_steps_that_do_not_fit_name_their_option(where: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device answers as a GPU does, and only this question."""
    for name in ("CudaDevice", "recorded_bytes", "cuda_cache_bytes", "overlap"):
        monkeypatch.setattr(allocation, name, full if name == where else lambda *_: 1)
    on_gpu: Any = types.SimpleNamespace(device=torch.device("cuda"), records_prompts=True)
    formats, limits, other = Formats(torch.bfloat16, "", torch.bfloat16), Limits(64, 1000), cast(Any, None)
    with pytest.raises(ServiceError, match=said):
        assert allocation.cache_room(CONFIG, on_gpu, None, formats, limits) == 1
        allocation.runner_for(CONFIG, other, on_gpu, other, limits)


def test_what_compiles_for_steps_of_any_size_does_it_at_start() -> None:
    assert memory.ladder(512) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert memory.ladder(24) == [1, 2, 4, 8, 16, 24] and memory.ladder(1) == [1]


def test_a_step_is_computed_without_the_cache_of_the_engine(model: Model) -> None:
    seen: list[tuple[int, ...]] = []
    forward, logits = model.forward, model.logits
    model.forward = lambda *given, **named: seen.append(tuple(given[0].shape)) or forward(*given, **named)  # type: ignore[method-assign, func-returns-value]
    model.logits = lambda hidden: seen.append(tuple(hidden.shape)) or logits(hidden)  # type: ignore[method-assign, func-returns-value]
    memory.whole_step(model, torch.float32, 30, memory.StepRows(5, 64, 8))
    width = model.config.hidden_size
    assert seen == [(30,), (5, width), (30, width)]  # a step, its rows, and a prompt that tells of its tokens


def test_a_step_that_is_longer_than_any_sequence_is_computed_of_several(model: Model) -> None:
    """A position behind the last one that a sequence can have is none of the model's."""
    length, given = 32, list[int]()
    forward = model.forward
    model.forward = lambda ids, positions, *rest, **named: (  # type: ignore[method-assign]
        given.extend(positions.tolist()) or forward(ids, positions, *rest, **named)  # type: ignore[func-returns-value]
    )
    memory.whole_step(model, torch.float32, 2 * length + 1, memory.StepRows(5, length, 8))
    assert len(given) == 2 * length + 1 and max(given) < length


def test_prompts_of_a_step_are_as_few_as_their_length_allows() -> None:
    assert memory.prompts_of(30, 64) == [30] and memory.prompts_of(64, 64) == [64]
    assert memory.prompts_of(65, 64) == [32, 33] and memory.prompts_of(200, 64) == [50] * 4
    assert memory.prompts_of(3, 1) == [1, 1, 1]


def test_sizes_are_those_of_the_settings() -> None:
    config = dataclasses.replace(CONFIG, speculation="ngram", max_draft_tokens=2, max_num_seqs=7)
    model = types.SimpleNamespace(records_prompts=True)
    slots, drafts, adapters = allocation.recorded_for(config, cast("Model", model), Limits(64, 1000))
    assert adapters is None and slots.adapter_slots == 0
    assert slots.max_tokens == config.max_num_batched_tokens
    model.records_prompts, config = False, dataclasses.replace(config, max_num_batched_tokens=2048)
    assert allocation.recorded_for(config, cast("Model", model), Limits(64, 1000))[0].max_tokens == 256
    assert (slots.num, slots.max_len, slots.block_size, drafts.lengths) == (7, 64, 8, (1, 2))
