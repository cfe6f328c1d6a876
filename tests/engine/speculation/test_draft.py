"""The draft model: its numbers are those of the model in plain use, after any movement of its blocks."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.plan import DraftTree
from sluice_server.engine.request import EngineRequest, SamplingParams
from tests.engine.speculation.test_verification import GREEDY, SAMPLED, Outputs, run
from tests.engine.test_engine_oracle import ROOMY, SHAPES, TIGHT, make_engine, named, some_prompts
from tests.oracle.checkpoints import Shape, make_checkpoint

TARGET = SHAPES["llama"]
OTHER = dataclasses.replace(TARGET, hidden=32, layers=1, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model that has little in common with it."""
    target = make_checkpoint(tmp_path_factory.mktemp("target"), TARGET)
    return target, make_checkpoint(tmp_path_factory.mktemp("draft"), OTHER, seed=3)


def drafting(target: Path, draft: Path, config: EngineConfig, num: int = 4) -> Engine:
    config = dataclasses.replace(
        config, speculation="draft", draft_model="x", draft_length="fixed", max_draft_tokens=num
    )
    model = read_config(target)
    return build_engine(config, model, target, limits_of(config, model, 1 << 20), draft, digests=named).engine


def plain(target: Path, prompts: dict[str, list[int]], **params: Any) -> Outputs:  # noqa: ANN401 # of SamplingParams' types
    return run(make_engine(target, ROOMY), prompts, **params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, {**SAMPLED, "n": 3}], ids=["greedy", "sampled", "several"])
def test_a_model_that_drafts_for_itself_is_always_right(models: tuple[Path, Path], params: dict[str, Any]) -> None:
    """Noise, keys and values are equal: in parts, after prefix hits, forks and preemption."""
    target, _ = models
    prompts = some_prompts(TARGET.vocab, 6)
    want = plain(target, prompts, **params)
    narrow = dataclasses.replace(TIGHT, kv_cache_tokens=128 if "n" in params else 112, max_num_seqs=8)
    for config, num in ((ROOMY, 4), (ROOMY, 1), (narrow, 3)):
        engine = drafting(target, target, config, num)
        for _ in range(2):
            assert run(engine, prompts, **params) == want
        stats = engine.scheduler.draft_stats
        assert stats.num_drafted == stats.num_accepted > 20
        assert config is ROOMY or engine.scheduler.num_preemptions > 0


@pytest.fixture
def swift_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends every read and write before the next step, so that nothing depends on the disk's speed."""
    ended: dict[BlockStore, list[tuple[Move, bool]]] = {}
    move, moved = BlockStore.move, BlockStore.moved

    def wait(self: BlockStore, moves: list[Move]) -> None:
        found = ended.setdefault(self, [])
        due = len(found) + sum(one.kind in (MoveKind.WRITE, MoveKind.READ) for one in moves)
        move(self, moves)
        while len(found) < due:
            os.sched_yield()
            found += moved(self)

    monkeypatch.setattr(BlockStore, "move", wait)
    monkeypatch.setattr(BlockStore, "moved", lambda self: ended.pop(self, []))


@pytest.mark.usefixtures("swift_disk")
def test_its_blocks_go_through_all_tiers(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = models
    prompts = some_prompts(TARGET.vocab, 9)
    want = plain(target, prompts, temperature=0.0)
    block_bytes = 2 * 2 * 8 * TARGET.layers * TARGET.kv_heads * TARGET.head_dim * 4
    tiers = {"host_cache_bytes": 6 * block_bytes, "disk_cache_bytes": 60 * block_bytes, "disk_cache_dir": str(tmp_path)}
    config = dataclasses.replace(TIGHT, **tiers)  # type: ignore[arg-type] # mixed values
    engine = drafting(target, target, config)
    for _ in range(3):
        assert run(engine, prompts, temperature=0.0) == want
    books = engine.scheduler.cache.tiers
    assert books is not None
    assert books.stats.num_restored and books.stats.num_written
    # A block may have gone down before the draft had computed its part of it: that costs acceptance, nothing else.
    assert engine.scheduler.draft_stats.num_accepted > 0.9 * engine.scheduler.draft_stats.num_drafted > 0


@pytest.mark.parametrize("params", [GREEDY, {**SAMPLED, "temperature": 2.0, "top_p": 1.0}], ids=["greedy", "sampled"])
def test_a_draft_that_is_often_wrong_changes_nothing(models: tuple[Path, Path], params: dict[str, Any]) -> None:
    target, draft = models
    prompts = some_prompts(TARGET.vocab, 6)
    want = plain(target, prompts, **params)
    for config in (ROOMY, TIGHT):
        engine = drafting(target, draft, config)
        assert run(engine, prompts, **params) == want
        stats = engine.scheduler.draft_stats
        assert stats.num_accepted < stats.num_drafted
        assert stats.num_accepted > 0 or params is GREEDY  # two random models agree by their noise only


def test_behind_a_sliding_window_it_drafts_as_long_as_it_sees_all(tmp_path: Path) -> None:
    shape = SHAPES["mistral-window"]
    target = make_checkpoint(tmp_path, shape)
    prompts = some_prompts(shape.vocab, 4)
    want = plain(target, prompts, temperature=0.0)
    engine = drafting(target, target, ROOMY)
    assert run(engine, prompts, temperature=0.0) == want
    assert engine.scheduler.draft_stats.num_drafted == engine.scheduler.draft_stats.num_accepted > 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dataclasses.replace(OTHER, vocab=112), r"has a vocabulary of 112 ids, the model 111"),
        (dataclasses.replace(TARGET, layers=3), r"has \d+ parameters, the model \d+"),
    ],
    ids=["vocabulary", "size"],
)
def test_a_draft_that_cannot_draft_is_refused_with_both_numbers(
    models: tuple[Path, Path], tmp_path: Path, shape: Shape, message: str
) -> None:
    with pytest.raises(ServiceError, match=f"--draft-model: {message}"):
        drafting(models[0], make_checkpoint(tmp_path, shape), ROOMY)


@pytest.mark.parametrize("params", [GREEDY, {**SAMPLED, "temperature": 1.5}], ids=["greedy", "sampled"])
def test_alternatives_are_what_else_would_have_been_sampled(models: tuple[Path, Path], params: dict[str, Any]) -> None:
    """A model that drafts for itself: with its first guess banned, the target would sample the second."""
    target, _ = models
    prompt = some_prompts(TARGET.vocab, 1)
    config = dataclasses.replace(ROOMY, max_draft_width=3)
    engine = drafting(target, target, config, num=9)
    name, ids = next(iter(prompt.items()))
    engine.add(EngineRequest(name, tuple(ids), SamplingParams(max_tokens=20, ignore_eos=True, **params)))
    first = engine.step().sampled[0].token_ids
    asks = engine.scheduler.asks(grow=True)
    assert engine.proposer is not None
    (tree,) = engine.proposer.propose(asks)
    assert isinstance(tree, DraftTree)
    assert tree.parents == (-1, 0, 1, -1, -1, 0, 0, 1, 1)
    said: list[int] = []
    for _ in range(3):
        answer = plain(target, prompt, **params, max_tokens=2, bad_token_ids=tuple(said))
        said.append(answer[name, 0][0][1])
        assert answer[name, 0][0][0] == first[0]
    assert said == [tree.token_ids[0], *tree.token_ids[3:5]]


def test_a_prompt_too_long_for_one_time_is_read_in_parts(models: tuple[Path, Path]) -> None:
    """Sequences that are ready are drafted for meanwhile; both report what was read of them and what was not."""
    target, _ = models
    config = dataclasses.replace(ROOMY, max_num_batched_tokens=64, max_model_len=256)
    engine = drafting(target, target, config)
    for i, num in enumerate((10, 100)):
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(f"{i:032x}", tuple(range(1, 1 + num)), params))
    proposer, engine.proposer = engine.proposer, None
    while len(asks := engine.scheduler.asks(grow=True)) < 2:
        engine.scheduler.offer(asks, [()] * len(asks), 0.0)
        engine.step()
    assert proposer is not None
    found = []
    for _ in range(2):
        drafts = proposer.propose(asks)
        memories = sorted((len(ask.tokens), ask.memory.num_read, ask.memory.num_unread) for ask in asks)
        found.append((sorted(len(one) for one in drafts if not isinstance(one, DraftTree)), memories))
    (short, long), (first, second) = (len(ask.tokens) for ask in sorted(asks, key=lambda ask: len(ask.tokens))), found
    assert first == ([0, 4], [(short, short, 0), (long, 64 - short, long - 64 + short)])
    assert second == ([4, 4], [(short, 1, 0), (long, long - 64 + short, 0)])


def test_company_that_comes_and_goes_changes_no_draft(models: tuple[Path, Path]) -> None:
    """The kept state of the last rows is theirs alone: others have other temperatures, seeds and lengths."""
    target, _ = models
    prompts = some_prompts(TARGET.vocab, 6)
    engine = drafting(target, target, ROOMY)
    for i, (name, ids) in enumerate(prompts.items()):
        params = SamplingParams(max_tokens=6 + 9 * i, temperature=0.4 * i, seed=i, ignore_eos=True)
        engine.add(EngineRequest(name, tuple(ids), params, max_draft_tokens=1 + i % 4))
        engine.step()
    while engine.has_work:
        engine.step()
    stats = engine.scheduler.draft_stats
    assert stats.num_drafted == stats.num_accepted > 60
