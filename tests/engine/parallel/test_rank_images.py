"""Images over several ranks, of which one has the vision tower: tokens of `transformers`."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.parallel.messages import GiveRows
from sluice_server.engine.parallel.told_rows import rows_as_told, rows_of, turned_as_told, turned_of
from tests.engine import test_images as squares
from tests.engine.parallel.thread_ranks import threaded
from tests.engine.test_engine_oracle import ROOMY
from tests.engine.test_images import cached, image, limits_for, run
from tests.engine.test_whole_images import GREEDY
from tests.oracle.image_families import FAMILIES, GEMMA3, GEMMA3_GRID, Family, Parts
from tests.oracle.vision_checkpoints import make_llava

ALL = (*FAMILIES.values(), GEMMA3)
SIZES = [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.long)]  # ranks of a stage, stages
BUDGETS = [7, 64, pytest.param(512, marks=pytest.mark.long)]


def config_of(size: tuple[int, int], budget: int = ROOMY.max_num_batched_tokens, **more: Any) -> EngineConfig:  # noqa: ANN401 # of settings
    more |= {"tensor_parallel_size": size[0], "pipeline_parallel_size": size[1]}
    return dataclasses.replace(ROOMY, threads=1, max_num_batched_tokens=budget, **more)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("family", ALL, ids=[one.name for one in ALL])
def test_tokens_equal_those_of_transformers(family: Family, size: tuple[int, int], budget: int, tmp_path: Path) -> None:
    reference = family.make(tmp_path)
    grids = [GEMMA3_GRID] * 2 if family is GEMMA3 else [(2, 6), (5, 1)]
    wide, tall = (family.picture(seed, grid) for seed, grid in enumerate(grids, 1))
    prompts: dict[str, Parts] = {
        "two": [5, tall, 6, wide, 7, 8, 9],
        "text": [5, 6, 9, 8, 7, 6, 5, 4, 3, 2, 9, 8],
        "again": [5, tall, 6, wide, 7, 4],
    }
    config = config_of(size, budget)
    with threaded(tmp_path, config, limits=limits_for(tmp_path, config)) as engine:
        for _ in range(2):  # the second time behind hits, which may end within an image
            found = run(engine, *(family.request(name, parts, params=GREEDY) for name, parts in prompts.items()))
            for name, parts in prompts.items():
                assert found[name] == family.greedy(reference, parts, found[name]), name
        assert engine.scheduler.cache.stats.hit_tokens > 0


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("tower", ["clip", pytest.param("siglip", marks=pytest.mark.long)])
def test_llava(tower: str, size: tuple[int, int], budget: int, tmp_path: Path) -> None:
    reference, config = make_llava(tmp_path, tower), config_of(size, budget)
    parts: squares.Parts = [5, 6, 7, 8, 9, 5, 6, 7, 1, 2, image(1), 3, 4, 5, image(2), 6, 7]
    with threaded(tmp_path, config, limits=limits_for(tmp_path, config)) as engine:
        found = run(engine, *(squares.asking(name, prompt) for name, prompt in squares.PROMPTS.items()))
        for name, prompt in squares.PROMPTS.items():
            assert found[name] == squares.oracle(reference, prompt), name
        assert cached(engine, squares.asking("whole", parts)) == (0, squares.oracle(reference, parts))
        within = squares.asking("ends inside an image", parts[:14])  # 29 tokens, in blocks of 8
        assert cached(engine, within) == (24, squares.oracle(reference, parts[:14]))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_slots_of_images_are_taken_while_other_steps_are_under_way(size: tuple[int, int], tmp_path: Path) -> None:
    """Rows are of the sequences that have the slots then, and not of those that had them before."""
    reference, config = make_llava(tmp_path, "clip"), config_of(size, max_num_seqs=3)
    prompts: dict[str, squares.Parts] = {
        f"{part} {num}": [5, image(num), 7] if part == "image" else [5, 6, num, *[7] * 16, 8]
        for num in range(1, 7)
        for part in ("image", "text")
    }
    with threaded(tmp_path, config, limits=limits_for(tmp_path, config)) as engine:
        found = run(engine, *(squares.asking(name, parts) for name, parts in prompts.items()))
    for name, parts in prompts.items():
        assert found[name] == squares.oracle(reference, parts), name


def test_rows_are_told_in_pieces() -> None:
    given = [(3, torch.randn(5, 4)), (9, torch.randn(1, 8))]
    told = list(rows_as_told(given, 32))
    assert [(one.first, one.width, len(one.rows)) for one in told] == [(3, 4, 32), (5, 4, 32), (7, 4, 16), (9, 8, 32)]
    assert torch.equal(torch.cat([rows_of(one)[1] for one in told[:3]]), given[0][1])
    assert next(rows_as_told(given, 1)) == GiveRows(3, 4, given[0][1][0].numpy().tobytes())


def test_positions_are_told_as_they_are() -> None:
    turned = [(2, torch.arange(12).view(3, 4)), (7, torch.arange(24).view(3, 8)[:, 2:])]
    found = turned_of(turned_as_told(turned))
    assert [first for first, _ in found] == [2, 7]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, turned, strict=True))
