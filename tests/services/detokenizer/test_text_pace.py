"""When text leaves: pure, with a clock and a timer of the test's own."""

from collections.abc import Callable

import pytest

from services.detokenizer.pace import DELTAS_PER_S, MAX_INTERVAL_S, Pace, Timer


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


def paced(num_open: int) -> tuple[Pace[int], Timers, list[int]]:
    timers, sent = Timers(), list[int]()
    pace = Pace(sent.append, Timer(lambda: timers.now_s, timers.call_later))
    pace.num_open = num_open
    return pace, timers, sent


def test_rare_text_leaves_in_the_same_turn() -> None:
    pace, timers, sent = paced(1)
    for _ in range(3):
        timers.now_s += 0.05
        pace.text_came(0)
        assert not sent
        pace.turn()
        assert sent == [0] and not timers.set
        sent.clear()


@pytest.mark.parametrize(("num_open", "interval_s"), [(8, 8 / DELTAS_PER_S), (300, MAX_INTERVAL_S)])
def test_much_text_is_gathered_for_an_interval(num_open: int, interval_s: float) -> None:
    pace, timers, sent = paced(num_open)
    outputs = list(range(num_open))
    for output in outputs:
        pace.text_came(output)
    pace.turn()
    start_s = timers.now_s
    assert sent == outputs
    for _ in range(3):
        timers.now_s += interval_s / 10
        for output in outputs:
            pace.text_came(output)
        pace.turn()
    assert sent == outputs and len(timers.set) == 1
    timers.fire()
    assert timers.now_s == pytest.approx(start_s + interval_s)
    assert sent == outputs * 2 and not timers.set
    pace.turn()
    assert sent == outputs * 2 and not timers.set, "nothing is due"
