"""The ring on a simulated clock, through crashes and lost or repeated frames: no client notices (S2)."""

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence

import pytest

from sluice_server.services.gateway.recovery.resend import Recovery
from sluice_server.services.gateway.recovery.watch import RingWatch
from sluice_server.services.gateway.requests.attempts import Attempts
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import OpenSerials
from tests.faults import pipeline
from tests.faults.pipeline import World

EVENTS = 10_000
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


# Every eighth is one of engines that join, leave, hand over and are cut off: of these the last are a thousand.
LONG = [pytest.param(seeds, marks=pytest.mark.long) for seeds in (range(12, 112), range(112, 1112), range(7, 8007, 8))]


@pytest.mark.parametrize("seeds", [(*range(12), 15), *LONG], ids=str)
def test_every_client_has_what_it_would_have_had_alone(seeds: Sequence[int]) -> None:
    # Not forked: a child would wait for ever for threads of grpc's that it does not have, if it collects their garbage.
    with concurrent.futures.ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        happened = sum(pool.map(play, seeds), Counter[str]())
    num, num_fleets = len(seeds), sum(seed % 8 == 7 for seed in seeds)
    assert happened["ended"] > 30 * num and happened["replayed"] > 5 * num and happened["crashes"] > 4 * num
    assert min(happened[what] for what in ("joined", "left", "cuts", "handed_off")) > 2 * num_fleets


def test_a_history_can_be_played_again() -> None:
    assert World(3).run(3000) == World(3).run(3000) != World(4).run(3000)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a history that does not end found out sooner."""
    monkeypatch.setattr(pipeline, "DRAIN_ROUNDS", 400)


def fails(*seeds: int) -> bool:
    """Whether one of these histories fails."""
    for seed in seeds:
        try:
            World(seed).run(EVENTS)
        except AssertionError:
            return True
    return False


@pytest.mark.usefixtures("soon")
def test_a_ring_that_takes_no_census_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation can fail: it finds planted bugs."""
    assert not fails(80, 64)
    monkeypatch.setattr(OpenSerials, "has_ended", lambda self, envelope: False)
    assert fails(80, 64)


@pytest.mark.usefixtures("soon")
def test_a_gateway_that_forgets_whom_a_loss_concerns_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fails(4, 14)
    monkeypatch.setattr(Recovery, "missed", lambda self, ids, requests: None)
    assert fails(4, 14)


@pytest.mark.long
def test_a_gateway_that_leaves_requests_with_an_engine_that_left_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(watch: RingWatch, ids: set[str], draining: set[str]) -> None:
        watch._engines.change(ids, draining)
        watch._liveness.change(watch._engines.ids)

    monkeypatch.setattr(RingWatch, "change_engines", change)
    assert fails(*range(5, 40, 8))


def test_a_hand_off_that_begins_anew_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Attempts.again

    def forgetting(attempts: Attempts, request: OpenRequest, now_s: float, *, is_hand_off: bool = False) -> None:
        for output in request.outputs if is_hand_off else ():
            del output.ids[:]
        again(attempts, request, now_s, is_hand_off=is_hand_off)

    monkeypatch.setattr(Attempts, "again", forgetting)
    assert fails(7)
