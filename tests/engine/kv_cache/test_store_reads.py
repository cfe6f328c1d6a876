"""Reads of the store: every move ends once, whatever the store does, and none is waited for behind its deadline."""

import queue
from collections.abc import Callable, Iterator, Sequence

import pytest

from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.store_reads import StoreReads

MOVES = [Move(MoveKind.FETCH, target=at, name=bytes([at])) for at in range(4)]
Give = Callable[[bytes], bytes | None]


class Asked:
    """A store that gives what a function says."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self.until: list[float] = []

    def blocks(self, names: Sequence[bytes], end_s: float) -> Iterator[bytes | None]:
        self.until.append(end_s)
        yield from map(self._give, names)


class Reading:
    """The reads of a store, with slots that keep what they were filled with."""

    def __init__(self, store: Asked, clock: Callable[[], float]) -> None:
        self.slots: dict[int, bytes] = {}
        self.ends: queue.SimpleQueue[tuple[Move, bool]] = queue.SimpleQueue()
        self.reads = StoreReads(store, self.slots.__setitem__, self.ends.put, lambda num: 0.1 * num, clock)

    def ended(self, num: int) -> list[tuple[int, bool]]:
        """The ends of so many moves."""
        ends = [self.ends.get(timeout=10) for _ in range(num)]
        return [(move.target, is_good) for move, is_good in ends]


def test_what_comes_is_filled_in_and_the_rest_has_failed() -> None:
    store = Asked(lambda name: None if name == b"\x01" else name * 3)
    reading = Reading(store, lambda: 7.0)
    reading.reads.begin(MOVES)
    assert reading.ended(4) == [(0, True), (1, False), (2, True), (3, True)]
    assert reading.slots == {0: b"\0" * 3, 2: b"\2" * 3, 3: b"\3" * 3} and store.until == [pytest.approx(7.4)]
    reading.reads.close()


def test_a_batch_whose_time_has_passed_before_its_turn_is_not_read() -> None:
    times = iter((0.0, 0.2, 0.3, 0.5))  # two batches begin; by then a read of the first has taken its time
    store = Asked(lambda name: name)
    reading = Reading(store, lambda: next(times))
    reading.reads.begin(MOVES[:2])
    assert reading.ended(2) == [(0, False), (1, False)] and not store.until
    reading.reads.begin(MOVES[2:])
    assert reading.ended(2) == [(2, False), (3, False)]
    reading.reads.close()


def test_a_store_that_breaks_costs_its_blocks_only(caplog: pytest.LogCaptureFixture) -> None:
    def give(name: bytes) -> bytes:
        if name == b"\x02":
            raise OSError("gone")
        return name

    reading = Reading(Asked(give), lambda: 0.0)
    reading.reads.begin(MOVES)
    assert reading.ended(4) == [(0, True), (1, True), (2, False), (3, False)]
    assert "gone; their tokens will be computed again" in caplog.text
    reading.reads.begin(MOVES[:1])
    assert reading.ended(1) == [(0, True)]
    reading.reads.close()
