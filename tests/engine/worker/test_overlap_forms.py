"""Steps of a device whose rows are trees of drafts, or share prefixes of the cache: the tokens of plain decoding."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker import overlapped
from sluice_server.engine.worker.device import HostCopy
from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape, forms_of
from sluice_server.engine.worker.launched import result_of
from sluice_server.engine.worker.overlapped import OverlappedRunner, overlap
from sluice_server.engine.worker.prefixes import SharedPrefixes
from sluice_server.engine.worker.recorded_steps import InFlightDrafts
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.startup.device_support import check_trees
from sluice_server.engine.worker.step_numbers import StepNumbers, UniformRows, numbers_of_step
from sluice_server.engine.worker.steps import UniformSteps
from sluice_server.kernels import gpu
from sluice_server.kernels.reference import speculation
from tests.engine.speculation.test_verification import Outputs, Prophet, run
from tests.engine.test_engine_oracle import SHAPES, some_prompts
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.engine.worker.test_overlapped import decode
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.heads import make_head

SHAPE = dataclasses.replace(SHAPES["llama"], layers=3)
PROMPTS = some_prompts(SHAPE.vocab, 4)
PARAMS: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12}
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    kv_cache_tokens=1024,
    threads=1,
    max_num_seqs=5,
    draft_length="fixed",
    max_draft_tokens=9,
)
BRANCHING = dataclasses.replace(CONFIG, speculation="draft", draft_model="x", max_draft_width=3)
NARROW = dataclasses.replace(BRANCHING, kv_cache_tokens=96, admission_watermark=-3.0)  # preempts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPE)
    (made / "head").mkdir()
    make_head(made / "head", SHAPE)
    return made


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)


def make(checkpoint: Path, config: EngineConfig, drafts: InFlightDrafts | None) -> Engine:
    """An engine on a device, with `drafts` if given."""
    model, draft = read_config(checkpoint), None
    if config.draft_model:
        draft = checkpoint / "head" if config.speculation == "eagle" else checkpoint
    limits = limits_of(config, model, 1 << 20)
    engine = build_engine(config, model, checkpoint, limits, draft).engine
    plain = engine.runner
    assert isinstance(plain, Runner)
    if drafts is not None:
        slots = Slots(config.max_num_seqs, limits.context_length, config.block_size)
        engine.runner = overlap(plain, plain._model, plain._store, HostDevice(), slots, drafts)
    return engine


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Outputs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "takes", lambda _: True)
        patch.setattr(gpu, "family", reference_family)
        return run(make(checkpoint, CONFIG, None), PROMPTS, **PARAMS)


class Log:
    """The forms of the launched steps, and the number of tokens moved within them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forms: list[RowShape] = []
        self.moved = 0
        self._is_within = False
        launch, move = UniformSteps.launch, BlockStore.move_slots

        def begun(graphs: Graphs[Any], rows: UniformRows) -> StepNumbers:
            self.forms.append(rows.form)
            return numbers_of_step(graphs, rows)

        def launched(steps: UniformSteps, graphs: Graphs[Any], numbers: StepNumbers, num: int) -> HostCopy:
            self._is_within = True
            try:
                return launch(steps, graphs, numbers, num)
            finally:
                self._is_within = False

        def moved(store: BlockStore, sources: torch.Tensor, targets: torch.Tensor) -> None:
            self.moved += int((sources != targets).sum()) if self._is_within else 0
            move(store, sources, targets)

        monkeypatch.setattr(UniformSteps, "launch", launched)
        monkeypatch.setattr(overlapped, "numbers_of_step", begun)
        monkeypatch.setattr(BlockStore, "move_slots", moved)


@pytest.mark.parametrize("config", [BRANCHING, NARROW], ids=["roomy", "narrow"])
def test_trees_are_verified_by_recorded_steps(
    checkpoint: Path,
    plain: Outputs,
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Trees of all forms, half of whose tokens are right; accepted tokens are moved on the device."""
    engine = make(checkpoint, config, InFlightDrafts((4, 9), may_branch=True))
    engine.proposer, log = Prophet(plain, 0.5), Log(monkeypatch)
    assert run(engine, PROMPTS, **PARAMS) == plain
    assert RowShape.TREES in log.forms and log.moved >= 3
    assert not caplog.records  # no step had to be computed again
    assert (engine.scheduler.num_preemptions > 0) is (config is NARROW)
    assert engine.scheduler.draft_stats.num_accepted >= 8


@pytest.mark.parametrize("speculation", ["draft", "eagle"])
def test_models_and_heads_branch(
    checkpoint: Path,
    plain: Outputs,
    speculation: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The draft model's cache and the hidden states of a head are moved along."""
    config, log = dataclasses.replace(BRANCHING, speculation=speculation), Log(monkeypatch)
    engine = make(checkpoint, config, InFlightDrafts((9,), may_branch=True))
    assert run(engine, PROMPTS, **PARAMS) == plain
    assert RowShape.TREES in log.forms and engine.scheduler.draft_stats.num_drafted > 0
    assert not caplog.records


@pytest.mark.parametrize("bug", ["moved nowhere", "moved elsewhere"])
def test_it_would_be_seen(checkpoint: Path, plain: Outputs, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = speculation.standing

    def wrong(*given: torch.Tensor) -> torch.Tensor:
        found, places = standing(*given), torch.arange(len(given[0]))
        return places if bug == "moved nowhere" else torch.where(found != places, found - 1, found)

    monkeypatch.setattr(speculation, "standing", wrong)
    engine = make(checkpoint, BRANCHING, InFlightDrafts((9,), may_branch=True))
    engine.proposer = Prophet(plain, 0.5)
    assert run(engine, PROMPTS, **PARAMS) != plain


def test_of_a_tree_only_what_stands_counts() -> None:
    """Row 0 accepts its third draft, row 1 none, and row 2 has NaN logits where it would."""
    plan = dataclasses.replace(
        decode([0, 1, 2], [5] * 3, [1, 7, 8, 9, 2, 7, 8, 9, 3, 7, 8, 9]),
        query_lens=[4] * 3,
        drafts=dict.fromkeys(range(3), 3),
        parents=dict.fromkeys(range(3), (-1, -1, 1)),
    )
    found = result_of(plan, [[8, -1, 9, 4], [6, 1, -1, 2], [8, 1, -1, 2]])
    assert found.failed == {2} and found.token_ids == [8, 6, 8]
    assert {row: run.token_ids for row, run in found.runs.items()} == {0: (8, 9, 4), 1: (6,)}


def test_steps_of_trees_are_recorded_at_start_and_those_of_prefixes_later() -> None:
    forms = forms_of((1, 4), may_branch=True)
    assert forms == [(1, RowShape.PLAIN), (2, RowShape.PLAIN), (5, RowShape.PLAIN), (5, RowShape.TREES)]
    assert forms_of((1, 4), may_branch=False) == forms[:3]
    graphs = Graphs(4, forms, lambda key: key, [(1, RowShape.SHARED)])
    graphs.warm()
    assert graphs.find(3, 4, RowShape.TREES) == GraphKey(4, 5, RowShape.TREES) and graphs.find(3, 4) == GraphKey(4, 5)
    assert graphs.find(2, 1, RowShape.SHARED) is None
    while graphs.grow():
        continue
    assert graphs.find(1, 1, RowShape.SHARED) == GraphKey(2, 1, RowShape.SHARED)


def test_steps_of_rows_with_adapters_are_recorded_beside_the_others() -> None:
    """But those of rows that share prefixes, and none of them where requests name no adapter."""
    forms, shared = [(1, RowShape.PLAIN), (3, RowShape.TREES)], [(1, RowShape.SHARED)]
    with_them, without = (
        Graphs(20, forms, lambda key: key, shared, 32, with_adapters=is_asked) for is_asked in (True, False)
    )
    for each in (with_them, without):
        each.warm()
    assert with_them.find(2, 1, has_adapters=True) == GraphKey(2, 1, has_adapters=True)
    assert with_them.find(17, 2, RowShape.TREES, has_adapters=True) == GraphKey(20, 3, RowShape.TREES, True)
    assert with_them.find(20, 30, RowShape.MIXED, has_adapters=True) == GraphKey(20, 32, RowShape.MIXED, True)
    assert (
        with_them.find(2, 1) == without.find(2, 1) == GraphKey(2, 1) and without.find(1, 1, has_adapters=True) is None
    )
    for each in (with_them, without):
        while each.grow():
            continue
    assert with_them.find(9, 1, has_adapters=True) == GraphKey(16, 1, has_adapters=True)
    assert with_them.find(2, 1, RowShape.SHARED) is not None
    assert with_them.find(2, 1, RowShape.SHARED, has_adapters=True) is None
    assert not [key for key in without._captured if key.has_adapters]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_forks_and_common_prompts_are_looked_at_once(
    checkpoint: Path, is_recorded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows change their order on the device without effect; forms that are not recorded yet are computed directly."""
    common = list(range(20))
    prompts = {"a": [*common, 30], "b": [7, 8], "c": [*common, 31, 32, 33], "d": [*common, 34]}
    params = {**PARAMS, "max_tokens": 9}
    want = run(make(checkpoint, CONFIG, None), prompts, **params)
    engine, log = make(checkpoint, CONFIG, InFlightDrafts(())), Log(monkeypatch)
    own = engine.runner
    assert isinstance(own, OverlappedRunner)
    own._prefixes = SharedPrefixes(own._plain.block_tables, CONFIG.block_size, least_saved=1)
    while is_recorded and own.idle():
        continue
    run(engine, {"first": common}, max_tokens=1, temperature=0.0)  # leaves its blocks behind
    assert run(engine, prompts, **params) == want
    assert run(engine, {"fork": list(range(40, 60))}, **params, n=3) == run(
        make(checkpoint, CONFIG, None), {"fork": list(range(40, 60))}, **params, n=3
    )
    assert log.forms.count(RowShape.SHARED) > 10 and not caplog.records


def test_prefixes_are_looked_for_when_other_rows_run() -> None:
    tables = torch.tensor([[1, 2, 3], [1, 2, 4], [5, 6, 7]], dtype=torch.int32).numpy()
    prefixes = SharedPrefixes(tables, 4, least_saved=1)
    found = prefixes.find([0, 1], [9, 9])
    assert found is not None and found.lengths == [8]
    tables[1] = 9
    assert prefixes.find([0, 1], [10, 10]) is found
    prefixes.forget()
    assert prefixes.find([0, 1], [10, 10]) is None


def test_a_model_behind_windows_looks_for_none(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, SHAPES["mistral-window"])
    own = make(made, CONFIG, InFlightDrafts(())).runner
    assert isinstance(own, OverlappedRunner) and own._prefixes is None
    while own.idle():
        continue
    assert own._graphs.find(2, 1, RowShape.SHARED) is None


def test_trees_within_a_window_are_refused(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, Shape("mistral", options=(("sliding_window", 10),)))
    with pytest.raises(ServiceError, match="--max-draft-width: 3 on cuda with a sliding window of 10 tokens: use 1"):
        check_trees(BRANCHING, read_config(made), torch.device("cuda"))
    check_trees(BRANCHING, read_config(made), torch.device("cpu"))
    check_trees(CONFIG, read_config(made), torch.device("cuda"))


def test_a_request_is_not_lost_where_a_step_of_trees_fails(
    checkpoint: Path, plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    engine = make(checkpoint, BRANCHING, InFlightDrafts((9,), may_branch=True))
    engine.proposer = Prophet(plain, 0.5)
    monkeypatch.setattr(speculation, "standing", fail)
    for name, prompt in PROMPTS.items():
        engine.add(EngineRequest(name, tuple(prompt), SamplingParams(ignore_eos=True, **PARAMS)))
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            found[event.request_id] += event.token_ids
    assert found == {name: ids for (name, _), (ids, _) in plain.items()}
