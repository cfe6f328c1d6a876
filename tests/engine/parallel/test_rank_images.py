"""Images over two ranks, of which one has the vision tower: tokens of `transformers`."""

import dataclasses
from pathlib import Path

import pytest
import torch

from sluice_server.engine.parallel.messages import GiveRows
from sluice_server.engine.parallel.told_rows import rows_as_told, rows_of, turned_as_told, turned_of
from tests.engine.parallel.thread_ranks import threaded
from tests.engine.test_engine_oracle import ROOMY
from tests.engine.test_images import limits_for, run
from tests.engine.test_whole_images import GREEDY
from tests.oracle.image_families import FAMILIES, GEMMA3, GEMMA3_GRID, Family, Parts

TWO = dataclasses.replace(ROOMY, tensor_parallel_size=2, threads=1)
ALL = (*FAMILIES.values(), GEMMA3)


@pytest.mark.parametrize("budget", [7, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ALL, ids=[one.name for one in ALL])
def test_tokens_equal_those_of_transformers(family: Family, budget: int, tmp_path: Path) -> None:
    reference = family.make(tmp_path)
    grids = [GEMMA3_GRID] * 2 if family is GEMMA3 else [(2, 6), (5, 1)]
    wide, tall = (family.picture(seed, grid) for seed, grid in enumerate(grids, 1))
    prompts: dict[str, Parts] = {
        "two": [5, tall, 6, wide, 7, 8, 9],
        "text": [5, 6, 9, 8, 7, 6, 5, 4, 3, 2, 9, 8],
        "again": [5, tall, 6, wide, 7, 4],
    }
    config = dataclasses.replace(TWO, max_num_batched_tokens=budget)
    with threaded(tmp_path, config, limits=limits_for(tmp_path, config)) as engine:
        for _ in range(2):  # the second time behind hits, which may end within an image
            found = run(engine, *(family.request(name, parts, params=GREEDY) for name, parts in prompts.items()))
            for name, parts in prompts.items():
                assert found[name] == family.greedy(reference, parts, found[name]), name
        assert engine.scheduler.cache.stats.hit_tokens > 0


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
