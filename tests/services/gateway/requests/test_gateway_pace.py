"""When streams are woken: pure, with a clock and a timer of the test's own."""

import functools
from collections.abc import Callable

import pytest

from services.gateway.contract.translate import Asked
from services.gateway.requests.open_requests import OpenRequest
from services.gateway.requests.pace import DELTAS_PER_S, MAX_INTERVAL_S, Pace
from services.messages import (
    Detokenized,
    Envelope,
)
from services.work import Detokenize


class Timers:
    """A clock that the test moves, and the timers set on it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.set: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.set.append((self.now_s + delay_s, callback))

    def fire(self) -> None:
        (at_s, callback) = self.set.pop(0)
        self.now_s = max(self.now_s, at_s)
        callback()


def opened(num_open: int) -> tuple[Pace, Timers, list[OpenRequest], list[str]]:
    timers, woken = Timers(), list[str]()
    pace = Pace(lambda: num_open, lambda: timers.now_s, timers.call_later)
    requests = []
    for i in range(num_open):
        name = str(i)
        request = OpenRequest(Envelope(request_id=name, origin="g"), Asked(Detokenize(b"")), 0.0, pace.text_came)
        request.on_news = functools.partial(woken.append, name)
        request.last_seq = 1
        requests.append(request)
    return pace, timers, requests, woken


def test_first_text_never_waits() -> None:
    pace, timers, (request,), woken = opened(1)
    request.last_seq = 0
    pace.text_came(request)
    assert woken == ["0"] and not timers.set


def test_rare_text_leaves_in_the_same_turn() -> None:
    pace, timers, (request,), woken = opened(1)
    for _ in range(3):
        timers.now_s += 0.05
        pace.text_came(request)
        assert timers.set[0][0] == timers.now_s
        timers.fire()
    assert woken == ["0"] * 3


@pytest.mark.parametrize(("num_open", "interval_s"), [(8, 8 / DELTAS_PER_S), (300, MAX_INTERVAL_S)])
def test_much_text_is_gathered_for_an_interval(num_open: int, interval_s: float) -> None:
    pace, timers, requests, woken = opened(num_open)
    for request in requests:
        pace.text_came(request)
    timers.fire()
    start_s = timers.now_s
    for _ in range(3):
        timers.now_s += interval_s / 10
        for request in requests:
            pace.text_came(request)
    assert len(woken) == num_open and len(timers.set) == 1
    timers.fire()
    assert timers.now_s == pytest.approx(start_s + interval_s)
    assert len(woken) == 2 * num_open and not timers.set


def test_the_end_never_waits() -> None:
    pace, timers, requests, woken = opened(300)
    pace.text_came(requests[0])
    timers.fire()
    pace.text_came(requests[1])
    requests[1].end(Detokenized("any"))
    assert woken == ["0", "1"]
