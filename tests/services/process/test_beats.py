"""The beats of a process's rings: one timer for all, with a clock and timers of the test."""

import asyncio
import functools
from collections.abc import Callable, Iterator

import pytest

from sluice_server.services.process.beats import Beats
from sluice_server.services.process.heartbeat import BEAT_S


class Timers:
    """A clock that the test moves, and the timers set on it, which a loop that never runs makes cancellable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now_s = 100.0
        self._loop = loop
        self._set: list[tuple[float, asyncio.TimerHandle, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        handle = self._loop.call_later(delay, callback)
        self._set.append((self.now_s + delay, handle, callback))
        return handle

    @property
    def due_s(self) -> list[float]:
        return [at_s for at_s, handle, _ in self._set if not handle.cancelled()]

    def fire(self, late_s: float = 0.0) -> None:
        (at_s, handle, callback), self._set = self._set[0], self._set[1:]
        self.now_s = at_s + late_s
        if not handle.cancelled():
            callback()


@pytest.fixture
def timers() -> Iterator[Timers]:
    loop = asyncio.new_event_loop()
    yield Timers(loop)
    loop.close()


@pytest.fixture
def beats(timers: Timers) -> Beats:
    return Beats(timers.call_later, lambda: timers.now_s)


def test_rings_that_were_joined_one_after_the_other_beat_at_one_wake_up(beats: Beats, timers: Timers) -> None:
    came: list[tuple[str, float]] = []
    beats.add(lambda elapsed_s: came.append(("one", elapsed_s)))
    timers.now_s += BEAT_S / 4
    beats.add(lambda elapsed_s: came.append(("other", elapsed_s)))
    assert came == [("one", 0.0), ("other", 0.0)]
    assert timers.due_s == [100.0 + BEAT_S]
    timers.fire()
    assert came[2:] == [("one", BEAT_S), ("other", BEAT_S * 3 / 4)]
    timers.fire()
    assert came[4:] == [("one", BEAT_S), ("other", BEAT_S)]
    assert len(timers.due_s) == 1


def test_a_pause_of_the_process_counts_as_two_beats(beats: Beats, timers: Timers) -> None:
    came: list[float] = []
    beats.add(came.append)
    timers.fire(late_s=60.0)
    assert came == [0.0, 2 * BEAT_S]


def test_a_ring_that_was_left_beats_no_more_and_the_last_one_ends_the_timer(beats: Beats, timers: Timers) -> None:
    came: list[str] = []
    leave_one = beats.add(lambda _: came.append("one"))
    leave_other = beats.add(lambda _: came.append("other"))
    came.clear()
    leave_one()
    timers.fire()
    assert came == ["other"]
    leave_other()
    leave_other()
    assert not timers.due_s
    beats.add(lambda _: came.append("third"))
    assert len(timers.due_s) == 1


def test_a_ring_may_be_left_within_the_beat_of_another(beats: Beats, timers: Timers) -> None:
    came: list[str] = []
    leaving: list[Callable[[], None]] = []

    def leave(elapsed_s: float) -> None:
        came.append("first")
        if elapsed_s:
            leaving.pop()()

    beats.add(leave)
    leaving.append(beats.add(lambda _: came.append("second")))
    timers.fire()
    assert came == ["first", "second", "first"]


def test_a_beat_that_fails_is_the_last_of_its_ring_only(
    beats: Beats, timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    came: list[str] = []

    def broken(name: str, elapsed_s: float) -> None:
        came.append(name)
        if elapsed_s:
            raise RuntimeError(name)

    beats.add(functools.partial(broken, "broken"))
    beats.add(lambda _: came.append("sound"))
    timers.fire()
    timers.fire()
    assert came == ["broken", "sound", "broken", "sound", "sound"]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_what_fails_at_once_is_never_added(beats: Beats, timers: Timers) -> None:
    def broken(elapsed_s: float) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        beats.add(broken)
    assert not timers.due_s
