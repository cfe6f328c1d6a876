"""The whole engine over stages: the tokens of one rank, whatever a request asks for."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import OutOfDeviceMemory
from sluice_server.engine.parallel.messages import Launch
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.runner import Runner
from tests.engine.parallel.test_rank_engine import HOST, SMALL, sampled, scores, structured
from tests.engine.parallel.test_rank_models import SHAPES
from tests.engine.parallel.thread_ranks import threaded
from tests.engine.test_engine_oracle import ROOMY, make_engine, run, some_prompts
from tests.engine.test_engine_search import run as run_search
from tests.engine.test_structured_output import run as run_structured
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.heads import make_head

SIZES = [(1, 2), pytest.param((2, 2), marks=pytest.mark.long)]
NAMES = ("llama-biases", "gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("phi3", "gpt-oss")))


def over(config: EngineConfig, size: tuple[int, int], **changes: Any) -> EngineConfig:  # noqa: ANN401 # of settings
    return dataclasses.replace(config, tensor_parallel_size=size[0], pipeline_parallel_size=size[1], **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = dataclasses.replace(SHAPES["llama-biases"], layers=3)  # unequal stages
    return make_checkpoint(tmp_path_factory.mktemp("llama"), shape)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_prefix_hits_and_preemption(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[name])
    prompts = some_prompts(SHAPES[name].vocab, 6)
    want = run(make_engine(directory, SMALL), prompts)
    with threaded(directory, over(SMALL, size)) as engine:
        assert run(engine, prompts) == want
        assert engine.scheduler.num_preemptions > 0 or name == "phi3"  # its window frees blocks
    with threaded(directory, over(ROOMY, size)) as engine:
        assert run(engine, prompts) == want
        assert run(engine, prompts) == want
        assert engine.scheduler.cache.stats.hit_tokens > 0


@pytest.mark.parametrize("size", SIZES)
def test_blocks_go_to_host_memory_and_come_back(llama: Path, size: tuple[int, int]) -> None:
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 9)
    want = run(make_engine(llama, HOST), prompts)
    with threaded(llama, over(HOST, size)) as engine:
        for _ in range(2):
            assert run(engine, prompts) == want
        tiers = engine.scheduler.cache.tiers
        assert tiers is not None and tiers.stats.num_restored


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_several_outputs_with_penalties_and_drafts(llama: Path, size: tuple[int, int], speculation: str) -> None:
    want = sampled(make_engine(llama, SMALL))
    with threaded(llama, over(SMALL, size, speculation=speculation, draft_length="fixed")) as engine:
        assert sampled(engine) == want


@pytest.mark.parametrize("num", [2, 3])
def test_every_stage_computes_another_step(llama: Path, num: int) -> None:
    """Requests take turns, and one prompt is cut in parts; a step is awaited when those behind it are under way."""
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 6)
    want = run(make_engine(llama, ROOMY), prompts)
    for given in (prompts, {"one": next(iter(prompts.values())) * 3}):
        with threaded(llama, over(ROOMY, (1, num))) as engine:
            found = run(engine, given)
            assert found == want or len(given) == 1
            workers = engine.runner._workers  # type: ignore[attr-defined] # of a group
            assert workers.num_ahead == num - 1


@pytest.mark.parametrize("speculation", [pytest.param("none", marks=pytest.mark.long), "ngram"])
def test_grammars(tmp_path: Path, speculation: str) -> None:
    """A row's mask is made when rank 0 computes the step, behind the tokens of the steps before."""
    directory, asked = structured(tmp_path)
    config = dataclasses.replace(SMALL, kv_cache_tokens=320)
    want = run_structured(make_engine(directory, config), asked)
    with threaded(directory, over(config, (1, 2), speculation=speculation, draft_length="fixed")) as engine:
        assert run_structured(engine, asked) == want


def test_cancelled_requests_leave_nothing_behind(llama: Path) -> None:
    """Their slots and blocks are taken by others while a stage still computes for them."""
    params: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 4)
    config = dataclasses.replace(ROOMY, max_num_seqs=6, kv_cache_tokens=6 * 64)
    want = run(make_engine(llama, config), prompts, max_tokens=40, repetition_penalty=1.3, **params)
    with threaded(llama, over(config, (1, 3))) as engine:
        for name, prompt in prompts.items():
            asked = SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.3, **params)
            engine.add(EngineRequest(name, tuple(prompt), asked))
        found: dict[str, list[int]] = {name: [] for name in prompts}
        for turn in range(1000):
            if not any(name in engine.scheduler._state.groups for name in prompts):
                break
            params_of_other = SamplingParams(max_tokens=9, seed=turn)
            engine.add(EngineRequest(f"{turn}", tuple(range(3, 5 + turn % 30)), params_of_other))
            for event in engine.step().sampled:
                found.get(event.request_id, []).extend(event.token_ids)
            running = [one.group.request_id for one in engine.scheduler._state.running]
            for name in [name for name in running if name not in want][: turn % 3]:
                engine.cancel(name)
        assert found == want


def test_a_draft_model_of_rank_0(llama: Path) -> None:
    """Its trees move keys on all stages."""
    settings = {"draft_model": "x", "draft_length": "fixed", "max_draft_tokens": 6, "max_draft_width": 3}
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 4)
    want = run(make_engine(llama, ROOMY), prompts)
    with threaded(llama, over(ROOMY, (1, 2), speculation="draft", **settings), draft=llama) as engine:
        assert run(engine, prompts) == want
        assert engine.scheduler.draft_stats.num_accepted > 10


@pytest.mark.parametrize(
    ("size", "behind", "width"),
    [
        ((1, 2), (1, 2, 4), 3),
        pytest.param((1, 4), (1, 2, 3), 1, marks=pytest.mark.long),
        pytest.param((2, 2), (1, 3, 4), 1, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_an_eagle_head_of_rank_0(
    tmp_path: Path, size: tuple[int, int], behind: tuple[int, int, int], width: int
) -> None:
    """Stages pass on what it reads of earlier layers."""
    shape = dataclasses.replace(SHAPES["llama-biases"], layers=4)
    (tmp_path / "model").mkdir()
    (tmp_path / "head").mkdir()
    directory = make_checkpoint(tmp_path / "model", shape)
    head = make_head(tmp_path / "head", shape, behind=behind)
    drafts = {"speculation": "eagle", "draft_model": "x", "draft_length": "fixed", "max_draft_width": width}
    config = dataclasses.replace(ROOMY, sum_shards=size[0], **drafts)  # type: ignore[arg-type] # mixed values
    prompts = some_prompts(shape.vocab, 4)
    want = run(make_engine(directory, dataclasses.replace(ROOMY, sum_shards=size[0])), prompts)
    alone = make_engine(directory, config, draft=head)
    assert run(alone, prompts) == want
    with threaded(directory, over(config, size), draft=head) as engine:
        assert run(engine, prompts) == want
        ours, theirs = engine.scheduler.draft_stats, alone.scheduler.draft_stats
        assert ours == theirs, "the same drafts, and so the same states"
        assert ours.num_drafted > 20


def test_beams(llama: Path) -> None:
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 3)
    params = {"beam_width": 3, "n": 2, "temperature": 0.0}
    want = run_search(make_engine(llama, SMALL), prompts, **params)
    with threaded(llama, over(SMALL, (1, 2))) as engine:
        assert run_search(engine, prompts, **params) == want


def test_prompt_logprobs(llama: Path) -> None:
    want = scores(make_engine(llama, SMALL))
    with threaded(llama, over(SMALL, (1, 3))) as engine:
        assert scores(engine) == want
    assert len(want) == 36


@pytest.mark.parametrize(
    "formats", [{"dtype": "bfloat16"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_the_tokens_of_one_rank_in_every_format(llama: Path, formats: dict[str, Any]) -> None:
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 8)
    want = run(make_engine(llama, dataclasses.replace(SMALL, **formats)), prompts)
    with threaded(llama, over(SMALL, (1, 2), **formats)) as engine:
        assert run(engine, prompts) == want


def failing(compute: Callable[..., Any], error: Exception, member: int, *, is_late: bool) -> Callable[..., Any]:
    """Computes, but fails at the third step and whenever there are several rows from then on."""
    calls = [0]

    def computed(self: Any, given: Any, *more: Any) -> Any:  # noqa: ANN401 # of a runner or a rank
        if isinstance(self, RankWorker) and self._rank != member:
            return compute(self, given, *more)
        plan = given.plan if isinstance(given, Launch) else given
        calls[0] += 1
        fails = calls[0] == 3 or (calls[0] > 3 and len(plan.slots) > 1)
        if fails and not is_late:
            raise error
        found = compute(self, given, *more)
        if fails:
            raise error
        return found

    return computed


@pytest.mark.parametrize("error", [RuntimeError("no"), OutOfDeviceMemory()], ids=repr)
@pytest.mark.parametrize(("where", "member"), [(Runner, 0), (RankWorker, 1), (RankWorker, 2)])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_fails_in_one_stage_is_tried_again_in_all(
    llama: Path, where: type[Any], member: int, error: Exception, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or behind what it computes: no hidden states of a failed step are taken for those of the next."""
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 4)
    want = run(make_engine(llama, ROOMY), prompts)
    with threaded(llama, over(ROOMY, (1, 3))) as engine:
        monkeypatch.setattr(where, "_compute", failing(where._compute, error, member, is_late=is_late))
        assert run(engine, prompts) == want


def held_workers(monkeypatch: pytest.MonkeyPatch) -> list[RankWorker]:
    """The ranks other than 0 that are made from now on."""
    workers: list[RankWorker] = []
    made = RankWorker.__init__

    def keep(worker: RankWorker, *given: Any, **named: Any) -> None:  # noqa: ANN401 # of any signature
        made(worker, *given, **named)
        workers.append(worker)

    monkeypatch.setattr(RankWorker, "__init__", keep)
    return workers


def failing_once(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Has the next step of rank 0 fail; returns where it is noted then."""
    compute, failed = Runner.launch, list[StepPlan]()

    def launch(runner: Runner, plan: StepPlan, *more: Any) -> Any:  # noqa: ANN401 # a step
        if not failed:
            failed.append(plan)
            raise RuntimeError
        return compute(runner, plan, *more)

    monkeypatch.setattr(Runner, "launch", launch)
    return failed


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_cleared_is_wiped_behind_the_steps_under_way(
    llama: Path, num: int, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """A request that is cancelled and cleared while stages compute for it leaves nothing in the cache of any rank, also
    where its step fails and is tried again for others."""
    workers = held_workers(monkeypatch)
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 6)
    with threaded(llama, over(ROOMY, (1, num))) as engine:
        for name, prompt in prompts.items():
            engine.add(EngineRequest(name, tuple(prompt), SamplingParams(max_tokens=20, ignore_eos=True)))
        for _ in range(4):
            engine.step()
        assert len(engine._in_flight) == num - 1, "steps are under way"
        for name in prompts:
            engine.cancel(name)
        engine.clear_cache(None)
        while engine.wipe(64):
            pass
        failed = failing_once(monkeypatch) if fails else []
        # The last request waits until every rank has done what it was told before.
        engine.add(EngineRequest("last", (3, 4, 5), SamplingParams(max_tokens=1, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        assert len(failed) == fails
        stores = [*(one._store for one in workers), engine.runner._plain._store]  # type: ignore[attr-defined] # a group's
        assert len(stores) == num
        for store in stores:
            left = {block for layer in store.cache for block in range(len(layer)) if bool(layer[block].any())}
            assert len(left) <= 1, "blocks beside that of the last request"
