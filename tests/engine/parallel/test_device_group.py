"""A group of ranks with a device each, of CPU tensors: whatever a request asks for, the outputs of one rank that adds
as many parts. Steps are in flight; sums and sampled ids are shared in recorded steps. Gloo stands in for NCCL."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import is_gloo_available

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import RankLost
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.parallel import build as rank_build
from sluice_server.engine.parallel.device_group import DeviceGroupRunner, WatchedCopy
from sluice_server.engine.parallel.device_steps import RecordedSteps
from sluice_server.engine.parallel.launches import GroupLaunches
from sluice_server.engine.parallel.messages import BeginStep, Launch, MoveBlocks, Order
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.startup import allocation
from sluice_server.kernels import gpu
from tests.engine.parallel.test_sums_nccl import group
from tests.engine.parallel.thread_ranks import ThreadPlace, threaded
from tests.engine.speculation.test_verification import Prophet
from tests.engine.speculation.test_verification import run as run_all
from tests.engine.test_engine_oracle import some_prompts
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.engine.worker.test_overlap_engine import MIXED, PLAIN, run
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.heads import make_head

pytestmark = pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")

SHAPE = Shape(layers=3, heads=4, kv_heads=2)
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    kv_cache_tokens=128,  # fewer than five sequences need
    threads=1,
    max_num_seqs=5,
    max_num_batched_tokens=24,
    max_model_len=48,
    draft_length="fixed",
    max_draft_tokens=3,
    sum_shards=2,
)
ROOMY = dataclasses.replace(CONFIG, kv_cache_tokens=512, max_draft_tokens=6, max_model_len=96)
PROMPTS = some_prompts(SHAPE.vocab, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)
    (made / "head").mkdir()
    make_head(made / "head", SHAPE, behind=(1, 2, 3))
    return made


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)
    for module in (allocation, rank_build):
        monkeypatch.setattr(module, "CudaDevice", lambda device: HostDevice())


def alone(directory: Path, config: EngineConfig, draft: Path | None = None) -> Engine:
    """One rank, without steps in flight."""
    model = read_config(directory)
    return build_engine(config, model, directory, limits_of(config, model, 1 << 20), draft).engine


@contextlib.contextmanager
def over_devices(
    directory: Path, config: EngineConfig, folder: Path, size: int = 2, draft: Path | None = None
) -> Iterator[Engine]:
    config = dataclasses.replace(config, tensor_parallel_size=size)
    shape = shape_of(config)
    ranks = [ThreadPlace(shape.of_member(one.rank), one, None) for one in group(folder, size, shape.sum_shards)]
    with threaded(directory, config, draft, ranks=ranks) as engine:
        assert isinstance(engine.runner, DeviceGroupRunner)
        yield engine


def told(engine: Engine) -> list[Order]:
    """What rank 0 has told the others."""
    found: list[Order] = engine.runner._workers.orders  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("seed", "kinds", "speculation"),
    [
        pytest.param(1, PLAIN, "none", id="plain"),
        pytest.param(2, MIXED, "none", id="mixed"),
        pytest.param(3, MIXED, "ngram", id="drafts"),
        *(pytest.param(seed, MIXED, "ngram", id=f"{seed}", marks=pytest.mark.long) for seed in range(4, 12)),
    ],
)
def test_the_outputs_of_one_rank(
    checkpoint: Path,
    tmp_path: Path,
    seed: int,
    kinds: list[dict[str, Any]],
    speculation: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = dataclasses.replace(CONFIG, speculation=speculation)
    want = run(alone(checkpoint, config), seed, kinds)
    with over_devices(checkpoint, config, tmp_path) as engine:
        assert run(engine, seed, kinds) == want
        steps = [order for order in told(engine) if isinstance(order, BeginStep)]
        assert any(one.is_sampled is (kinds is PLAIN) for one in steps)
    assert not caplog.records, "no step had to be computed again"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_blocks_go_to_host_memory_and_come_back(checkpoint: Path, tmp_path: Path, size: int) -> None:
    config = dataclasses.replace(CONFIG, sum_shards=4, host_cache_bytes=1 << 18, max_model_len=96)
    prompts = some_prompts(SHAPE.vocab, 9)
    want = run_all(alone(checkpoint, config), prompts, max_tokens=6, temperature=0.0)
    with over_devices(checkpoint, config, tmp_path, size) as engine:
        for _ in range(2):
            assert run_all(engine, prompts, max_tokens=6, temperature=0.0) == want
        assert any(isinstance(order, MoveBlocks) for order in told(engine))


@pytest.mark.parametrize("speculation", ["draft", "eagle"])
def test_drafts_of_rank_0_branch(checkpoint: Path, tmp_path: Path, speculation: str) -> None:
    """What is kept of a tree moves on every device behind the ids that rank 0 has shared."""
    branching = dataclasses.replace(ROOMY, speculation=speculation, draft_model="x", max_draft_width=3)
    draft = checkpoint / "head" if speculation == "eagle" else checkpoint
    want = run_all(alone(checkpoint, ROOMY), PROMPTS, max_tokens=10, temperature=0.0)
    with over_devices(checkpoint, branching, tmp_path, draft=draft) as engine:
        assert run_all(engine, PROMPTS, max_tokens=10, temperature=0.0) == want
        assert engine.scheduler.draft_stats.num_drafted > 0
        engine.proposer = Prophet(want, 0.5)
        assert run_all(engine, PROMPTS, max_tokens=10, temperature=0.0) == want
        assert engine.scheduler.draft_stats.num_accepted > 5
        assert any(isinstance(order, BeginStep) and order.form == "TREES" for order in told(engine))


def test_what_is_not_recorded_is_computed_from_its_plan(checkpoint: Path, tmp_path: Path) -> None:
    """Scores of prompts, while other rows have steps in flight."""
    scored = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    plain = SamplingParams(max_tokens=8, temperature=0.0)

    def found(engine: Engine) -> list[Any]:
        engine.add(EngineRequest("a" * 32, tuple(range(3, 9)), plain))
        seen: list[Any] = []
        for step in itertools.count():
            if step == 3:
                engine.add(EngineRequest("b" * 32, tuple(range(3, 40)), scored))
            if step > 3 and not engine.has_work:
                return sorted(seen, key=str)
            events = engine.step()
            assert not events.failed
            for event in events.sampled:
                seen += [(event.request_id, one) for one in event.token_ids]
                if event.admission is not None:
                    seen += [score.logprob for score in event.admission.prompt_scores or ()]
        raise AssertionError

    want = found(alone(checkpoint, CONFIG))
    with over_devices(checkpoint, CONFIG, tmp_path) as engine:
        assert found(engine) == want
        assert {Launch, BeginStep} <= set(map(type, told(engine)))


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_step_that_fails_behind_its_sums_is_tried_again_on_all(
    checkpoint: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [{"logprobs": 2}]
    want = run(alone(checkpoint, CONFIG), 5, kinds)
    owner, name = (Runner, "_sample") if where == "here" else (RecordedSteps, "begin")
    compute, num = getattr(owner, name), 0

    def failing(self: Any, *given: Any) -> Any:  # noqa: ANN401 # of either
        nonlocal num
        num, found = num + 1, compute(self, *given)
        if num == 4:
            raise RuntimeError("no")
        return found

    monkeypatch.setattr(owner, name, failing)
    with over_devices(checkpoint, CONFIG, tmp_path) as engine:
        assert run(engine, 5, kinds) == want
    assert any("trying its rows one by one" in record.message for record in caplog.records)


def test_ranks_that_are_out_of_step_end_the_group(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = RankWorker._launch

    def behind(self: RankWorker, order: Any, compute: Any) -> Any:  # noqa: ANN401 # as its
        ended = launch(self, order, compute)
        return dataclasses.replace(ended, num_sums=ended.num_sums - (order.num > 3))

    monkeypatch.setattr(RankWorker, "_launch", behind)
    with over_devices(checkpoint, CONFIG, tmp_path) as engine:
        engine.add(EngineRequest("a", (3, 4, 5), SamplingParams(max_tokens=9, ignore_eos=True)))
        with pytest.raises(RankLost, match=r"rank 1 is at sum \d+, rank 0 at \d+: start the group anew"):
            while engine.has_work:
                engine.step()


class Arrival:
    """A copy that is never there."""

    is_there = False

    def wait(self) -> "np.ndarray[Any, Any]":
        raise AssertionError("the host would wait for ever")


class Others:
    """Ranks of which one may have ended."""

    lost = ""

    def look(self) -> None:
        if self.lost:
            raise RankLost(self.lost)

    def launched(self, num: int) -> list[Any]:
        return []


def test_a_device_that_stands_still_is_not_awaited_for_ever() -> None:
    """A rank that has ended is named; else the bound on a rank's silence counts."""
    now_s, others = 0.0, Others()

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    launches = GroupLaunches(others, 1, (), clock)
    with pytest.raises(RankLost, match="the device has not ended a step within 4 s: a rank is missing in its sums"):
        WatchedCopy(Arrival(), launches, clock).wait()
    others.lost = "rank 1 has ended"
    with pytest.raises(RankLost, match="rank 1 has ended"):
        WatchedCopy(Arrival(), launches, clock).wait()
