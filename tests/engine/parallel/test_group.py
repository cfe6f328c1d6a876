"""A group of ranks that all compute the whole model: each gets every plan, and every cache holds the same bytes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import OutOfDeviceMemory, RankLost
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.parallel.group import GroupRunner
from sluice_server.engine.parallel.messages import Launch, MoveAccepted, MoveBlocks, Moved
from sluice_server.engine.parallel.sums import SumsBroken
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from sluice_server.engine.worker.runner import Runner
from tests.engine.parallel.copies import CopiedGroup, copied
from tests.engine.speculation.test_verification import SAMPLED, Prophet
from tests.engine.speculation.test_verification import run as run_all
from tests.engine.test_engine_oracle import ROOMY, SHAPES, TIGHT, make_engine, run, some_prompts
from tests.oracle.checkpoints import make_checkpoint

NAMES = ("llama", "mistral-window", "qwen3-experts", "gemma2")
HOST = dataclasses.replace(TIGHT, host_cache_bytes=1 << 16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPES["llama"])


def group(directory: Path, config: EngineConfig, num: int = 1) -> CopiedGroup:
    return copied(make_engine(directory, config), directory, config, num)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", [ROOMY, TIGHT, HOST], ids=["roomy", "tight", "host"])
def test_every_rank_computes_every_step(tmp_path: Path, name: str, config: EngineConfig) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[name])
    prompts = some_prompts(SHAPES[name].vocab, 9)
    want = run(make_engine(directory, config), prompts)
    made = group(directory, config, 2)
    for _ in range(2):  # then with what is left of the prefixes
        assert run(made.engine, prompts) == want
        made.check()
    if config is HOST:
        assert any(isinstance(order, MoveBlocks) for order in made.workers.orders)


@pytest.mark.parametrize(
    "changes", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str
)
def test_in_every_number_format(llama: Path, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(TIGHT, **changes)
    prompts = some_prompts(SHAPES["llama"].vocab, 6)
    want = run(make_engine(llama, config), prompts)
    made = group(llama, config)
    assert run(made.engine, prompts) == want
    made.check()


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_that_are_kept_move_on_every_rank(llama: Path, width: int) -> None:
    """Half of the drafts are right; in trees their keys move to other positions."""
    settings = {"speculation": "draft", "draft_length": "fixed", "max_draft_tokens": 12, "max_draft_width": width}
    prompts = some_prompts(SHAPES["llama"].vocab, 5)
    want = run_all(make_engine(llama, ROOMY), prompts, **SAMPLED)
    made = group(llama, dataclasses.replace(ROOMY, **settings))  # type: ignore[arg-type] # mixed values
    made.engine.proposer = Prophet(want, 0.5)
    assert run_all(made.engine, prompts, **SAMPLED) == want
    assert made.engine.scheduler.draft_stats.num_accepted > 10
    assert any(isinstance(order, MoveAccepted) for order in made.workers.orders) == (width > 1)
    made.check()


def test_prompts_are_scored_by_every_rank(llama: Path) -> None:
    """Ranks share the vocabulary, so each must compute the logits of the same tokens."""
    made = group(llama, TIGHT)
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    made.engine.add(EngineRequest("a" * 32, tuple(range(3, 30)), params))
    while made.engine.has_work:
        assert not made.engine.step().failed
    launches = [order for order in made.workers.orders if isinstance(order, Launch)]
    assert sum(end - first for launch in launches for first, end in launch.spans) == 26
    assert launches[0].is_whole


def test_vectors_are_pooled(llama: Path) -> None:
    request = EngineRequest("a" * 32, tuple(range(3, 30)), SamplingParams(max_tokens=1), pooling=Pooling.MEAN)
    vectors = []
    for engine in (make_engine(llama, TIGHT), group(llama, TIGHT).engine):
        engine.add(request)
        while engine.has_work:
            vectors += [pooled.vector for pooled in engine.step().pooled]
    assert vectors[0] == vectors[1]


class Failing:
    """Fails the n-th call and then every call that has more rows than one."""

    def __init__(self, error: Exception, at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, num_rows: int) -> None:
        self.calls += 1
        if self.calls == self.at or (self.calls > self.at and num_rows > 1):
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no"), OutOfDeviceMemory()], ids=repr)
@pytest.mark.parametrize("where", [Runner, RankWorker])
def test_a_step_that_fails_on_one_rank_is_tried_again_on_all(
    llama: Path, where: type[Any], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some_prompts(SHAPES["llama"].vocab, 5)
    want = run(make_engine(llama, ROOMY), prompts)
    made, failing, compute = group(llama, ROOMY), Failing(error, 3), where._compute

    def computed(self: object, given: Any, *more: Any) -> object:  # noqa: ANN401 # a plan or a launch
        plan = given.plan if isinstance(given, Launch) else given
        failing(len(plan.slots))
        return compute(self, given, *more)

    monkeypatch.setattr(where, "_compute", computed)
    assert run(made.engine, prompts) == want
    assert failing.calls > 20
    made.check()


def test_a_sum_that_breaks_ends_the_engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are out of step cannot try again."""

    def broken(self: Runner, plan: object, images: object) -> object:
        raise SumsBroken(1, "rank 1 did not come")

    made = group(llama, ROOMY)
    monkeypatch.setattr(Runner, "_compute", broken)
    made.engine.add(EngineRequest("a" * 32, (3, 4, 5), SamplingParams(max_tokens=3)))
    with pytest.raises(RankLost, match="rank 1 did not come"):
        made.engine.step()


def test_times_of_ranks_are_added_up(llama: Path) -> None:
    made = group(llama, ROOMY, 2)
    run(made.engine, some_prompts(SHAPES["llama"].vocab, 3))
    runner = made.engine.runner
    assert isinstance(runner, GroupRunner)
    assert len(runner.launches.times) == 3
    assert all(times.compute_s > times.sums_s == 0.0 for times in runner.launches.times)
    assert runner.launches.skew_s > 0.0


def test_the_loss_of_a_rank_is_seen_where_no_step_waits_for_it(llama: Path) -> None:
    """While the engine is idle, and while requests wait for something else; but a look costs, so not each time."""
    made = group(llama, ROOMY)
    runner, now_s = made.engine.runner, 0.0
    assert isinstance(runner, GroupRunner)
    runner.launches._clock = lambda: now_s
    runner.launches._looked_s = 0.0
    made.workers.lost = "worker-0-1 has ended"
    made.engine.idle()
    for look in (made.engine.idle, made.engine.step):
        now_s += 1.0
        with pytest.raises(RankLost, match="worker-0-1 has ended"):
            look()


def test_a_block_that_a_rank_could_not_read_or_write_is_removed_on_all(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = group(llama, HOST)
    runner, write = made.engine.runner, Move(MoveKind.WRITE, 1, -1, b"name")
    assert isinstance(runner, GroupRunner)
    monkeypatch.setattr(runner._plain, "moved", lambda: [(write, True)])
    assert runner.moved() == [], "another rank has not told yet"
    monkeypatch.setattr(runner._plain, "moved", list)
    made.workers.told = [Moved(1, [(write, False)])]
    assert runner.moved() == [(write, False)]
    assert made.workers.orders[-1] == MoveBlocks([Move(MoveKind.REMOVE, -1, -1, b"name")])
    monkeypatch.setattr(runner._plain, "moved", lambda: [(write, True)])
    made.workers.told = [Moved(1, [(write, True)])]
    assert runner.moved() == [(write, True)] and len(made.workers.orders) == 1
