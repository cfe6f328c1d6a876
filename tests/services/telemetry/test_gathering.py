"""Calls that are made together: in order, a moment later, none lost."""

from collections.abc import Callable

import pytest

from sluice_server.services.telemetry.gathering import DELAY_S, MAX_GATHERED, Gathering


class Timers:
    """Timers that run when they are told to."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay_s: float, call: Callable[[], object]) -> "Timers":
        self.set.append((delay_s, call))
        return self

    def cancel(self) -> None:
        self.set.pop()

    def run(self) -> None:
        ((delay_s, call),) = self.set
        assert delay_s == DELAY_S
        call()


def test_calls_wait_for_one_timer_and_keep_their_order() -> None:
    timers, made = Timers(), list[int]()
    gathering = Gathering(timers.call_later)
    for i in range(3):
        gathering.add(lambda i=i: made.append(i))  # type: ignore[misc] # the present i
    assert not made
    timers.run()
    assert made == [0, 1, 2] and not timers.set
    gathering.add(lambda: made.append(3))
    timers.run()
    assert made[3:] == [3]


def test_many_are_made_before_their_time_and_the_timer_is_cancelled() -> None:
    timers, made = Timers(), list[int]()
    gathering = Gathering(timers.call_later)
    for i in range(MAX_GATHERED + 1):
        gathering.add(lambda i=i: made.append(i))  # type: ignore[misc] # the present i
    assert made == list(range(MAX_GATHERED)) and len(timers.set) == 1
    gathering.flush()
    assert made[-1] == MAX_GATHERED and not timers.set


def test_one_that_fails_costs_no_other() -> None:
    timers, made = Timers(), list[str]()
    gathering = Gathering(timers.call_later)
    gathering.add(lambda: made.append("before"))
    gathering.add(lambda: 1 / 0)
    gathering.add(lambda: made.append("behind"))
    with pytest.raises(ZeroDivisionError):
        timers.run()
    assert made == ["before"]
    timers.run()
    assert made == ["before", "behind"] and not timers.set


def test_what_needs_them_comes_behind_those_that_wait() -> None:
    """Spans of a request that is kept after all must be held by then."""
    timers, made = Timers(), list[str]()
    gathering = Gathering(timers.call_later)
    keep = gathering.behind(made.append)
    keep("first")
    gathering.add(lambda: made.append("spans"))
    keep("second")
    assert made == ["first", "spans", "second"] and not timers.set
