"""Histories of requests whose adapters outnumber the slots: they reach what they are for, and notice planted bugs."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from sluice_server.engine.adapters.shelf import Shelf
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.scheduler.adapters import RequestAdapters
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.waiting import WaitingQueue
from tests.engine.scheduler.simulate import Simulation

SEEDS = (6, 30, 34, 14)  # of those with adapters


def test_the_histories_reach_everything() -> None:
    mixed = steps = lost = dropped = failed = waited = 0
    for seed in SEEDS:
        simulation = Simulation(seed)
        simulation.run(2500)
        adapters = simulation.adapters
        steps, mixed = steps + adapters.num_steps, mixed + adapters.num_mixed
        lost, dropped = lost + adapters.num_lost, dropped + adapters.num_dropped
        failed += simulation.ledger.ends["failed"]
        waited += adapters.requests.waits.snapshot().num
    assert steps > 5000 and mixed > 100 and lost > 5 and dropped > 40 and failed > 30 and waited > 300


def hold_uncounted(self: RequestAdapters, request: EngineRequest) -> int:
    return -1 if request.adapter is None else self.shelf.entries()[request.adapter.digest].slot


def hold_the_base(self: RequestAdapters, request: EngineRequest) -> int:
    hold(self, request)
    return -1


def give_nothing(self: RequestAdapters, request: EngineRequest) -> None:
    pass


def ready_while_it_comes(self: RequestAdapters, request: EngineRequest) -> bool:
    return request.adapter is None or self.shelf.entries()[request.adapter.digest].slot >= 0


def none_fails(self: RequestAdapters, groups: Iterable[SequenceGroup]) -> Iterator[Any]:
    self.shelf.take_lost()
    return iter(())


def never_in_the_way(self: RequestAdapters, request: EngineRequest) -> bool:
    return False


def none_is_late(self: RequestAdapters, waiting: WaitingQueue, running: Iterable[Sequence], now: float) -> None:
    self._turn_s = float("inf")
    look_over(self, waiting, [], now) if not waiting else self.shelf.look_over(
        {one.group.request.adapter.digest: False for one in waiting if one.group.request.adapter}
    )


def drop_what_is_named(self: RequestAdapters, digest: bytes) -> None:
    if self.shelf.has(digest):
        self.shelf.remove(digest)


def evict_what_runs(self: Shelf, digest: bytes) -> None:
    self._free_slot(digest)
    self._entries[digest].refs = 0


hold, look_over = RequestAdapters.hold, RequestAdapters.look_over
BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "running sequences are not counted": (RequestAdapters, "hold", hold_uncounted),
    "rows are computed by the base": (RequestAdapters, "hold", hold_the_base),
    "what ended is counted for ever": (RequestAdapters, "give", give_nothing),
    "begins before the load has ended": (RequestAdapters, "are_ready", ready_while_it_comes),
    "a lost adapter fails no request": (RequestAdapters, "take_failed", none_fails),
    "a paused sequence keeps the slot": (RequestAdapters, "are_in_the_way", never_in_the_way),
    "nobody is late": (RequestAdapters, "look_over", none_is_late),
    "drops what open requests name": (RequestAdapters, "drop", drop_what_is_named),
    "evicts what was given back once": (Shelf, "give", evict_what_runs),
}


@pytest.mark.parametrize(("owner", "name", "bug"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_noticed(
    owner: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, KeyError)):
        for seed in SEEDS:
            Simulation(seed).run(2500)
