"""Trees of drafts in a whole engine: the tokens of plain decoding, in cases that single out one mistake each."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.speculation import trees
from sluice_server.engine.worker import forward as forward_module
from sluice_server.engine.worker import sample_positions as spots_module
from sluice_server.engine.worker.runner import Runner
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.trees import Tree, tree_of
from tests.engine.speculation.test_verification import SAMPLED, Outputs, Prophet, run
from tests.engine.test_engine_oracle import ROOMY, SHAPES, TIGHT, make_engine, some_prompts
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.heads import make_head

SHAPE = dataclasses.replace(SHAPES["llama"], layers=3)
PROMPTS = some_prompts(SHAPE.vocab, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPE)
    (made / "head").mkdir()
    make_head(made / "head", SHAPE)
    return made


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Outputs:
    return run(make_engine(checkpoint, ROOMY), PROMPTS, **SAMPLED, logprobs=1)


def branching(checkpoint: Path, config: EngineConfig = ROOMY, **changes: Any) -> Engine:  # noqa: ANN401 # of settings' types
    settings = {"speculation": "draft", "draft_model": "x", "draft_length": "fixed", "max_draft_tokens": 12}
    config = dataclasses.replace(config, **{**settings, "max_draft_width": 3, **changes})
    model = read_config(checkpoint)
    draft = checkpoint / "head" if config.speculation == "eagle" else checkpoint
    return build_engine(config, model, checkpoint, limits_of(config, model, 1 << 20), draft).engine


def guessed(checkpoint: Path, plain: Outputs, config: EngineConfig = ROOMY) -> Engine:
    """An engine with trees of all forms, half of whose tokens are right."""
    engine = branching(checkpoint, config)
    return Engine(engine.scheduler, engine.runner, proposer=Prophet(plain, 0.5))


@pytest.mark.usefixtures("preempts_at_once")
@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_accepted_drafts_come_from_all_over_the_tree(
    checkpoint: Path, plain: Outputs, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    move = BlockStore.move_slots

    def count(self: BlockStore, sources: torch.Tensor, targets: torch.Tensor) -> None:
        moved.append(len(sources))
        move(self, sources, targets)

    monkeypatch.setattr(BlockStore, "move_slots", count)
    engine = guessed(checkpoint, plain, config)
    assert run(engine, PROMPTS, **SAMPLED, logprobs=1) == plain
    assert sum(moved) > 3 and max(moved) > 1
    stats = engine.scheduler.draft_stats
    assert sum(stats.drafted_at) == stats.num_drafted > sum(stats.accepted_at) == stats.num_accepted > 10
    assert all(0 <= right <= drafted for right, drafted in zip(stats.accepted_at, stats.drafted_at, strict=True))


def test_without_our_own_kernels(checkpoint: Path, plain: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MODULE", None)
    want = run(make_engine(checkpoint, ROOMY), PROMPTS, **SAMPLED)
    assert run(guessed(checkpoint, plain), PROMPTS, **SAMPLED) == want


@pytest.mark.parametrize(
    "changes",
    [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"quantization": "int8"}],
    ids=str,
)
def test_in_every_number_format(checkpoint: Path, plain: Outputs, changes: dict[str, Any]) -> None:
    want = run(make_engine(checkpoint, dataclasses.replace(ROOMY, **changes)), PROMPTS, **SAMPLED)
    engine = guessed(checkpoint, plain, dataclasses.replace(ROOMY, **changes))
    assert run(engine, PROMPTS, **SAMPLED) == want


@pytest.mark.parametrize("name", ["mistral-window", "qwen3", "gemma2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_other_models(name: str, tmp_path: Path) -> None:
    """Among them is a model with a window of keys, which depends on positions."""
    made = make_checkpoint(tmp_path, SHAPES[name])
    prompts = some_prompts(SHAPES[name].vocab, 4)
    want = run(make_engine(made, ROOMY), prompts, **SAMPLED)
    assert run(guessed(made, want), prompts, **SAMPLED) == want


@pytest.mark.parametrize("speculation", ["draft", "eagle"])
@pytest.mark.parametrize("length", ["fixed", "adaptive"])
def test_models_and_heads_branch(checkpoint: Path, plain: Outputs, speculation: str, length: str) -> None:
    engine = branching(checkpoint, speculation=speculation, draft_length=length)
    assert run(engine, PROMPTS, **SAMPLED, logprobs=1) == plain
    assert engine.scheduler.draft_stats.num_drafted > 0


def test_a_step_that_fails_with_a_tree_is_computed_without(
    checkpoint: Path, plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Runner, moves: list[tuple[int, int, int]]) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Runner, "_close_ranks", fail)
    assert run(guessed(checkpoint, plain), PROMPTS, **SAMPLED, logprobs=1) == plain


def forget_to_move(self: Runner, moves: list[tuple[int, int, int]]) -> None:
    """A bug: accepted drafts stay where they are."""


def move_one_too_far(self: Runner, moves: list[tuple[int, int, int]]) -> None:
    close_ranks(self, [(slot, source, target + 1) for slot, source, target in moves])


def wrong_parents(num: int, parents: tuple[int, ...]) -> Tree:
    return tree_of(num, tuple(max(-1, parent - 1) for parent in parents))


def see_the_one_before(num: int, parents: tuple[int, ...]) -> Tree:
    """A bug: each draft attends to the one before it, siblings too."""
    return Tree.chain(num + len(parents))


def accept_after_any_token(ids: Any, parents: Any, sampled: Any) -> list[int]:  # noqa: ANN401 # as of `walk`
    return walk(ids, [min(i - 1, 0) for i in range(len(ids))], sampled)


def count_all_before(ids: Any, parents: Any) -> list[list[int]]:  # noqa: ANN401 # as of `paths_of`
    """A bug: the history of a draft is counted as if its tree were a chain."""
    return [list(ids[: i + 1]) for i in range(len(ids))]


close_ranks, walk = Runner._close_ranks, trees.walk
BUGS: list[tuple[Any, str, Callable[..., object]]] = [
    (Runner, "_close_ranks", forget_to_move),
    (Runner, "_close_ranks", move_one_too_far),
    (forward_module, "tree_of", wrong_parents),
    (forward_module, "tree_of", see_the_one_before),
    (spots_module, "walk", accept_after_any_token),
    (spots_module, "paths_of", count_all_before),
]


@pytest.mark.parametrize(("where", "name", "bug"), BUGS, ids=[bug.__name__ for _, _, bug in BUGS])
def test_it_would_be_seen(
    where: Any,  # noqa: ANN401 # a class or a module
    name: str,
    bug: Callable[..., object],
    checkpoint: Path,
    plain: Outputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, name, bug)
    try:
        found = run(guessed(checkpoint, plain), PROMPTS, **SAMPLED, logprobs=1)
    except (AssertionError, IndexError):
        return
    assert found != plain


def test_where_nothing_else_may_be_said_nothing_branches(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = {**SAMPLED, "allowed_token_ids": (5,)}
    engine = branching(checkpoint)
    assert run(engine, PROMPTS, **params) == run(make_engine(checkpoint, ROOMY), PROMPTS, **params)
    stats = engine.scheduler.draft_stats
    assert stats.num_accepted == stats.num_drafted > 0
    assert not [record for record in caplog.records if record.name.startswith("sluice_server.engine.speculation")]
