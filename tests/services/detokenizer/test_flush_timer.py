"""When text is flushed: pure logic with a clock and a timer of the test."""

import itertools
from collections.abc import Callable

import pytest

from sluice_server.services.detokenizer.flush_timer import (
    AT_ONCE,
    DELTAS_PER_S,
    MAX_INTERVAL_S,
    MAX_PARTS,
    PART_DELTAS,
    PART_TEXTS,
    Alarm,
    FlushTimer,
)


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


def paced(num_open: int, max_interval_s: float = MAX_INTERVAL_S) -> tuple[FlushTimer[int], Timers, list[int]]:
    timers, sent = Timers(), list[int]()
    pace = FlushTimer(sent.append, Alarm(lambda: timers.now_s, timers.call_later), max_interval_s)
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


def test_much_text_is_gathered_for_an_interval() -> None:
    num_open = PART_DELTAS // 2
    pace, timers, sent = paced(num_open)
    outputs = list(range(num_open))
    for output in outputs:
        pace.text_came(output)
    pace.turn()
    start_s = timers.now_s
    assert sent == outputs
    for _ in range(3):
        timers.now_s += num_open / DELTAS_PER_S / 10
        for output in outputs:
            pace.text_came(output)
        pace.turn()
    assert sent == outputs and len(timers.set) == 1
    timers.fire()
    assert timers.now_s == pytest.approx(start_s + num_open / DELTAS_PER_S)
    assert sent == outputs * 2 and not timers.set
    pace.turn()
    assert sent == outputs * 2 and not timers.set, "nothing is due"


def test_many_outputs_leave_in_parts_each_once_an_interval() -> None:
    num_open, num_parts = 8 * PART_DELTAS, MAX_PARTS
    pace, timers, sent = paced(num_open)
    left_s: dict[int, list[float]] = {output: [] for output in range(num_open)}
    for _ in range(3 * num_parts):
        for output in left_s:  # all have text all the time
            pace.text_came(output)
        pace.turn()
        assert 0 < len(sent) <= -(-num_open // num_parts)
        for output in sent:
            left_s[output].append(timers.now_s)
        sent.clear()
        timers.fire()
    assert {len(times) for times in left_s.values()} == {3}
    gaps = [later - before for times in left_s.values() for before, later in itertools.pairwise(times)]
    assert min(gaps) == pytest.approx(MAX_INTERVAL_S) == max(gaps)


@pytest.mark.parametrize(("num_open", "num_parts"), [(PART_DELTAS // 2, 1), (2 * PART_DELTAS, 2), (1000, MAX_PARTS)])
def test_a_part_is_no_smaller_than_a_wake_up_is_worth(num_open: int, num_parts: int) -> None:
    assert paced(num_open)[0].num_parts == num_parts
    assert paced(num_open, 0.0)[0].num_parts == 1


def test_much_text_leaves_in_more_parts() -> None:
    num_open = PART_DELTAS // 2
    pace, timers, _ = paced(num_open)
    counts = []
    most = PART_TEXTS // num_open  # texts each, of one part
    for num_texts in (1, most, 2 * most, 1):
        for output in list(range(num_open)) * num_texts:
            pace.text_came(output)
        pace.turn()
        if timers.set:
            timers.fire()
        counts.append(pace.num_parts)
    assert counts == [1, 1, 2, 1]


def test_text_of_few_beside_many_of_other_models_is_gathered_as_theirs_is() -> None:
    pace, timers, sent = paced(1)
    pace.num_generating = 1000
    for _ in range(3):
        pace.text_came(0)
        pace.turn()
        timers.now_s += MAX_INTERVAL_S / 4
    assert pace.interval_s == MAX_INTERVAL_S and pace.num_parts == 1  # of one, there is one part
    assert sent == [0] and len(timers.set) == 1
    timers.fire()
    assert sent == [0, 0]
    pace.num_generating = 0  # not told of the newest ones here yet
    assert pace.interval_s == 1 / DELTAS_PER_S


def test_few_of_many_are_told_no_oftener_for_it() -> None:
    pace, timers, sent = paced(300)
    start_s = timers.now_s
    while timers.now_s < start_s + 10 * MAX_INTERVAL_S:
        pace.text_came(7)
        pace.turn()
        timers.now_s += 0.0001
        while timers.set and timers.set[0][0] <= timers.now_s:
            timers.fire()
    assert sent.count(7) == pytest.approx(10, abs=1)


def test_without_a_timer_nothing_waits() -> None:
    sent = list[int]()
    pace = FlushTimer(sent.append, AT_ONCE)
    pace.num_open = 300
    for _ in range(2):
        for output in range(300):
            pace.text_came(output)
        pace.turn()
    assert sorted(sent) == sorted([*range(300), *range(300)])


def test_an_operator_chooses_the_longest_interval() -> None:
    assert paced(1000, 0.1)[0].interval_s == 0.1
    assert paced(1000)[0].interval_s == MAX_INTERVAL_S
    assert paced(8, 0.1)[0].interval_s == 8 / DELTAS_PER_S


def test_without_an_interval_all_text_leaves_in_its_turn() -> None:
    pace, timers, sent = paced(2 * PART_DELTAS, 0.0)
    for _ in range(2):
        for output in range(2 * PART_DELTAS):
            pace.text_came(output)
        pace.turn()
        assert sent == list(range(2 * PART_DELTAS)) and not timers.set
        sent.clear()
