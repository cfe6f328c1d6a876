"""A device's runner on CPU tensors: rows, recorded steps, overlap, and the order of swaps."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.plan import IN_FLIGHT, DraftRequest, Placement, StepPlan
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds
from sluice_server.engine.request import EngineRequest, ProcessorCall, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape, sizes
from sluice_server.engine.worker.launched import result_of
from sluice_server.engine.worker.overlapped import OverlappedRunner, overlap
from sluice_server.engine.worker.recorded_steps import InFlightDrafts
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.staging import wants_only_sampling
from sluice_server.engine.worker.startup.allocation import recorded_drafts
from sluice_server.kernels import gpu, ops
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=8,
    kv_cache_tokens=512,
    threads=1,
    max_num_seqs=4,
    max_num_batched_tokens=16,
)
PROMPTS = {"a": [1, 2, 3], "b": list(range(4, 30)), "c": [9] * 9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape(kv_heads=1))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatches operations as on a GPU, to the reference implementations."""
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)


def make(checkpoint: Path, drafts: tuple[int, ...] = ()) -> tuple[Engine, Engine, HostDevice]:
    """Two engines on one model: one with a device's runner, one with the plain runner."""
    config = read_config(checkpoint)
    limits = limits_of(CONFIG, config, 1 << 20)
    model = load_model(checkpoint, config, torch.float32, torch.device("cpu"), 64)
    device, engines = HostDevice(), []
    for is_plain in (False, True):
        store = BlockStore(model.new_cache(64, CONFIG.block_size), num_host=2)
        runner = Runner(model, store, CONFIG.block_size, CONFIG.max_num_seqs, 64)
        cache = KVCache(64, CONFIG.block_size, True)
        scheduler = Scheduler(cache, limits, config.eos_ids, CONFIG.max_num_seqs, 16, settings_of(CONFIG, None))
        if is_plain:
            engines.append(Engine(scheduler, runner))
        else:
            slots = Slots(CONFIG.max_num_seqs, 64, CONFIG.block_size, CONFIG.max_num_batched_tokens)
            own = overlap(runner, model, store, device, slots, InFlightDrafts(drafts))
            engines.append(Engine(scheduler, own))
    return engines[0], engines[1], device


def run(engine: Engine, **params: Any) -> dict[str, list[int]]:  # noqa: ANN401 # of SamplingParams' types
    for name, prompt in PROMPTS.items():
        options = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "seed": 7, **params}
        engine.add(EngineRequest(name, tuple(prompt), SamplingParams(**options)))
    out: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            out[event.request_id] += event.token_ids
    return out


MANY: list[dict[str, Any]] = [
    *({}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"logprobs": 2}, {"presence_penalty": 0.7}),
    *({"min_tokens": 3}, {"logit_bias": ((5, 2.0),)}, {"n": 2, "temperature": 1.0}),
]


@pytest.mark.parametrize("params", MANY, ids=str)
def test_the_same_tokens_as_the_plain_runner(
    checkpoint: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in parts beside decodes, and rows that need more than sampling: every forward pass is a recorded one."""
    own, plain, device = make(checkpoint)
    captured = device.log.count("capture")
    # Forward pass and sampling of each size, and of mixed steps of 16 tokens.
    assert captured == 2 * (len(sizes(CONFIG.max_num_seqs)[0]) + 1)
    want = run(plain, **params)
    monkeypatch.setattr(Runner, "launch", None)
    assert run(own, **params) == want and "replay" in device.log
    assert device.log.count("capture") == captured  # never while requests wait


def test_drafts_are_verified_by_recorded_steps(checkpoint: Path) -> None:
    """Rows with the same number of drafts each, right and wrong."""
    own, plain, device = make(checkpoint, (2,))
    expected = run(plain)
    own.proposer = Oracle(expected)
    assert run(own) == expected
    assert "replay" in device.log


class Oracle:
    """Drafts two tokens: both right in every third call, else the second one is wrong."""

    writes_cache = False

    def __init__(self, expected: dict[str, list[int]]) -> None:
        self._whole = {tuple(prompt): prompt + expected[name] for name, prompt in PROMPTS.items()}
        self._asks = 0

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        """The drafts of each sequence."""
        drafts = []
        for ask in asks:
            self._asks += 1
            (whole,) = (all_of for prompt, all_of in self._whole.items() if tuple(ask.tokens[: len(prompt)]) == prompt)
            drafted = whole[len(ask.tokens) :][:2]
            drafts.append(drafted if self._asks % 3 else [*drafted[:1], 0][:2])
        return drafts


def prefilled(engine: Engine, temperature: float) -> tuple[list[int], list[int], list[int]]:
    """Slots, positions and last tokens of rows whose prompts are computed, by a plain step of that engine."""
    placements = [
        Placement(i, SamplingParams(temperature=temperature, seed=i), (), 0, tokens=()) for i in range(len(PROMPTS))
    ]
    lens = [len(prompt) for prompt in PROMPTS.values()]
    blocks = [BlockRun(i, 0, list(range(1 + 6 * i, 7 + 6 * i))) for i in range(len(lens))]
    ids = [token for prompt in PROMPTS.values() for token in prompt]
    plan = StepPlan(1, list(range(len(lens))), lens, [0] * len(lens), ids, [True] * len(lens), placements, blocks)
    engine.runner.place(plan)
    return plan.slots, lens, engine.runner.launch(plan).collect().token_ids


def decode(slots: list[int], starts: list[int], ids: list[int]) -> StepPlan:
    return StepPlan(2, slots, [1] * len(slots), starts, ids, [True] * len(slots), [], [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_is_launched_before_the_one_before_it_is_collected(checkpoint: Path, temperature: float) -> None:
    own, plain, device = make(checkpoint)
    slots, starts, ids = prefilled(plain, temperature)
    want = []
    for _ in range(4):
        ids = plain.runner.launch(decode(slots, starts, ids)).collect().token_ids
        starts = [start + 1 for start in starts]
        want.append(ids)
    slots, starts, ids = prefilled(own, temperature)
    device.log.clear()
    pending = [own.runner.launch(decode(slots, starts, ids))]
    got = []
    for i in range(1, 4):
        known = [IN_FLIGHT] * len(slots)
        pending.append(own.runner.launch(decode(slots, [start + i for start in starts], known)))
        got.append(pending.pop(0).collect().token_ids)
    got.append(pending.pop().collect().token_ids)
    assert got == want
    begun, step = [entry for entry in device.log if entry in ("replay", "wait")], ["replay"] * 2
    assert begun == [*step, *step, "wait", *step, "wait", *step, "wait", "wait"]


def test_a_step_that_needs_the_host_waits_for_what_is_in_flight(checkpoint: Path) -> None:
    own, plain, _ = make(checkpoint)
    slots, starts, ids = prefilled(plain, 0.0)
    first = plain.runner.launch(decode(slots, starts, ids)).collect().token_ids
    then = [start + 1 for start in starts]
    want = plain.runner.launch(decode(slots, then, first)).collect().token_ids
    slots, starts, ids = prefilled(own, 0.0)
    own.runner.launch(decode(slots, starts, ids))
    mixed = StepPlan(3, slots, [1] * 3, then, [IN_FLIGHT] * 3, [True, True, False], [], [])
    assert own.runner.launch(mixed).collect().token_ids == [*want[:2], -1]


def test_swaps_go_aside_and_come_before_the_next_step(checkpoint: Path) -> None:
    own, _, device = make(checkpoint)
    slots, starts, ids = prefilled(own, 0.0)
    device.log.clear()
    own.runner.move([Move(MoveKind.SAVE, 1, 0)])
    own.runner.launch(decode(slots, starts, ids)).collect()
    assert device.log == ["aside", "join", "replay", "replay", "download", "wait"]


def test_a_row_without_a_usable_number_fails_alone() -> None:
    plan = dataclasses.replace(
        decode([0, 1, 2], [5, 5, 5], [1, 2, 3]), query_lens=[2] * 3, token_ids=[1, 7, 2, 8, 3, 9]
    )
    found = result_of(dataclasses.replace(plan, drafts={0: 1, 1: 1, 2: 1}), [[7, -1], [3, -1], [9, 4]])
    assert found.failed == {0}  # of the second the draft was wrong: what is behind it does not count
    assert found.runs[1].token_ids == (3, -1) and found.runs[2].token_ids == (9, 4)


def test_what_cannot_be_sampled_is_no_id_for_the_step_behind(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _, _ = make(checkpoint)
    slots, starts, ids = prefilled(own, 0.0)
    monkeypatch.setattr(ops, "sample", lambda logits, _: (torch.full((len(logits),), -1), torch.ones(len(logits)) > 0))
    found = own.runner.launch(decode(slots, starts, ids)).collect()
    assert found.failed == {0, 1, 2} and isinstance(own.runner, OverlappedRunner)
    assert own.runner._state.tokens.min() >= 0


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))])
def test_adaptive_drafts_have_recorded_steps_of_every_length(most: int, sizes: tuple[int, ...]) -> None:
    config = dataclasses.replace(CONFIG, speculation="ngram", max_draft_tokens=most)
    assert recorded_drafts(config) == sizes
    assert recorded_drafts(dataclasses.replace(config, draft_length="fixed")) == (most,)
    assert recorded_drafts(CONFIG) == ()


def test_ids_in_flight_are_filled_in_by_slot() -> None:
    plan = decode([4, 2], [5, 6], [IN_FLIGHT, 8])
    assert plan.known({2: 1, 4: 3}).token_ids == [3, 8]


def test_sizes_are_captured_largest_first_and_a_step_takes_the_least_that_holds_it() -> None:
    order: list[GraphKey] = []

    def capture(key: GraphKey) -> GraphKey:
        order.append(key)
        return key

    graphs = Graphs(40, [(1, RowShape.PLAIN), (3, RowShape.PLAIN)], capture)
    graphs.warm()
    assert [key.num_rows for key in order[::2]] == [40, 32, 16, 8, 4, 2, 1]
    assert graphs.find(17, 1) == GraphKey(32, 1) and graphs.find(33, 3) == GraphKey(40, 3)
    assert graphs.find(41, 1) is None and graphs.find(1, 2) == GraphKey(1, 3) and graphs.find(1, 4) is None
    assert not graphs.grow() and sizes(100)[1] == [96, 80, 48]


def test_a_device_without_memory_to_record_more_goes_on_with_what_it_has(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, plain, device = make(checkpoint)

    def full(body: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "capture", full)
    assert not own.idle() and "2 sizes are computed without" in caplog.text  # 4, 2: of shared prefixes
    caplog.clear()
    assert not own.idle() and not caplog.text
    assert run(own) == run(plain)


@pytest.mark.parametrize(
    "params",
    [
        *({"logprobs": 0}, {"min_tokens": 2}, {"bad_token_ids": (1,)}, {"grammar": "g"}, {"presence_penalty": 0.5}),
        {"logits_processors": (ProcessorCall("a"),)},
    ],
    ids=str,
)
def test_what_wants_more_than_sampling_is_known(params: dict[str, Any]) -> None:
    assert wants_only_sampling(Placement(0, SamplingParams(top_k=5), (2,), 0))
    assert not wants_only_sampling(Placement(0, SamplingParams(**params), (), 0))


def test_embeddings_of_a_prompt_leave_recorded_steps_which_look_ids_up(checkpoint: Path) -> None:
    """Until they are computed."""
    own, plain, _ = make(checkpoint)
    assert isinstance(own.runner, OverlappedRunner) and isinstance(plain.runner, Runner)
    embeds = PromptEmbeds(bytes(4 * 48 * 3), EmbedsType.FLOAT32, 3)
    own.runner.place(StepPlan(1, [], [], [], [], [], [Placement(1, SamplingParams(), (), 0, prompt_embeds=embeds)], []))
    for start, is_given in ((0, True), (2, True), (3, False)):
        plan = StepPlan(1, [1], [2], [start], [0, 0], [True], [], [])
        assert own.runner._plain.needs_hidden(plan) is is_given
        assert own.runner._is_recorded(plan, has_adapters=False, is_mixed=True) is not is_given
