"""The ring on a simulated clock, through crashes and lost or repeated frames: no client notices (S2)."""

import concurrent.futures
import multiprocessing
import os

import pytest

from sluice_server.services.gateway.recovery.resend import Recovery
from sluice_server.services.gateway.recovery.watch import RingWatch
from sluice_server.services.messages.messages import OpenSerials
from tests.faults.pipeline import World

EVENTS = 10_000
JOBS = len(os.sched_getaffinity(0))


def play(seed: int) -> tuple[int, int, int]:
    """The numbers of requests that ended, of replays and of crashes."""
    world = World(seed)
    try:
        world.run(EVENTS)
    except AssertionError as error:
        raise AssertionError(f"replay with: python -m tests.faults.pipeline --seed {seed} --events {EVENTS}") from error
    return world.num_ended, world.num_replayed, world.num_crashes


LONG = [pytest.param(seeds, marks=pytest.mark.long) for seeds in (range(12, 112), range(112, 1112))]


@pytest.mark.parametrize("seeds", [range(12), *LONG], ids=str)
def test_every_client_has_what_it_would_have_had_alone(seeds: range) -> None:
    # Not forked: a child would wait for ever for threads of grpc's that it does not have, if it collects their garbage.
    with concurrent.futures.ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(play, seeds))
    ended, replayed, crashes = (sum(column) for column in zip(*results, strict=True))
    assert ended > 30 * len(seeds) and replayed > 5 * len(seeds) and crashes > 5 * len(seeds)


def test_a_history_can_be_played_again() -> None:
    assert World(3).run(3000) == World(3).run(3000) != World(4).run(3000)


def fails(seeds: range) -> bool:
    """Whether one of these histories fails."""
    for seed in seeds:
        try:
            World(seed).run(EVENTS)
        except AssertionError:
            return True
    return False


def test_a_ring_that_takes_no_census_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation can fail: it finds planted bugs."""
    monkeypatch.setattr(OpenSerials, "has_ended", lambda self, envelope: False)
    assert fails(range(72, 90))


def test_a_gateway_that_forgets_whom_a_loss_concerns_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recovery, "missed", lambda self, ids, requests: None)
    assert fails(range(40))


@pytest.mark.long
def test_a_gateway_that_leaves_requests_with_an_engine_that_left_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(watch: RingWatch, ids: set[str], draining: set[str]) -> None:
        watch._engines.change(ids, draining)
        watch._liveness.change(watch._engines.ids)

    monkeypatch.setattr(RingWatch, "change_engines", change)
    assert fails(range(5, 40, 8))
