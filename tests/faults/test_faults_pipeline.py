"""The ring on a simulated clock, through crashes and lost or repeated frames: no client notices (S2)."""

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.faults.pipeline import World

EVENTS = 4_000
JOBS = len(os.sched_getaffinity(0))


def play(seed: int) -> Counter[str]:
    """What happened in a history."""
    world = World(seed)
    try:
        world.run(EVENTS)
    except AssertionError as error:
        raise AssertionError(f"replay with: python -m tests.faults.pipeline --seed {seed} --events {EVENTS}") from error
    happened = Counter(ended=world.num_ended, replayed=world.num_replayed, crashes=world.num_crashes)
    if seed % 8 == 7:
        happened += Counter(joined=world.num_joined, left=world.num_left, cuts=world.num_cuts)
        happened += Counter(handed_off=world.num_handed_off)
    return happened


QUICK = (0, 1, 3, 5, 7, 11, 13, 15)
# Every eighth is one of engines that join, leave, hand over and are cut off: of these the last are a thousand.
LONG = [pytest.param(seeds, marks=pytest.mark.long) for seeds in (range(12, 112), range(112, 1112), range(7, 8007, 8))]


@pytest.mark.parametrize("seeds", [QUICK, *LONG], ids=str)
def test_every_client_has_what_it_would_have_had_alone(seeds: Sequence[int]) -> None:
    # Not forked: a child would wait for ever for threads of grpc's that it does not have, if it collects their garbage.
    with concurrent.futures.ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        happened = sum(pool.map(play, seeds), Counter[str]())
    num, num_fleets = len(seeds), sum(seed % 8 == 7 for seed in seeds)
    assert happened["ended"] > 60 * num and happened["replayed"] > 10 * num and happened["crashes"] > 3 * num
    assert min(happened[what] for what in ("joined", "left", "cuts", "handed_off")) > num_fleets


def test_a_history_can_be_played_again() -> None:
    assert World(3).run(3000) == World(3).run(3000) != World(4).run(3000)
