"""The share of a core that the thread takes that reads adapters."""

import pytest

from sluice_server.engine.adapters.pace import CROWDED, PART_S, REST_S, ROOMY, Pace, share_beside


class Thread:
    """A thread that computes, and a pace that it keeps."""

    def __init__(self) -> None:
        self.computed_s = self.slept_s = 0.0
        self.longest_s = 0.0  # that it computed without a rest
        self._since_s = 0.0
        self.pace = Pace(lambda: self.computed_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, self.computed_s - self._since_s)
        self.slept_s += seconds
        self._since_s = self.computed_s

    def compute(self, seconds: float, part_s: float) -> None:
        end_s = self.computed_s + seconds
        while self.computed_s < end_s:
            self.computed_s += part_s
            self.pace.rest()

    @property
    def share(self) -> float:
        return self.computed_s / (self.computed_s + self.slept_s)


@pytest.mark.parametrize("part_s", [0.00001, 0.00015, 0.004])
@pytest.mark.parametrize("share", [CROWDED, ROOMY])
def test_the_thread_takes_its_share_whatever_the_parts_are(share: float, part_s: float) -> None:
    thread = Thread()
    thread.pace.share = share
    thread.compute(0.1, part_s)
    assert thread.share == pytest.approx(share, rel=0.02)
    assert thread.longest_s < PART_S + 1.01 * part_s


def test_at_full_speed_it_still_rests_between_parts() -> None:
    """Otherwise the thread of the steps waits for the interpreter as long as the whole load takes."""
    thread = Thread()
    for _ in range(100):
        thread.compute(1.5 * PART_S, 1.5 * PART_S)
    assert thread.slept_s == pytest.approx(100 * REST_S)


def test_a_share_counts_from_the_next_rest_on() -> None:
    thread = Thread()
    thread.pace.share = CROWDED
    thread.compute(0.01, PART_S)
    slept_s = thread.slept_s
    thread.pace.share = 1.0
    thread.compute(0.01, PART_S)
    assert slept_s > 8 * (thread.slept_s - slept_s)


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "share"),
    [(0, 0, 1.0), (0, 5, 1.0), (8, 0, 0.1), (8, 1, 0.1), (8, 8, 0.1), (8, 16, 0.5), (2, 20, 0.9)],
    ids=["idle", "all wait", "none waits", "one waits", "as many", "twice as many", "most wait"],
)
def test_loads_take_more_only_where_more_wait_than_run(num_running: int, num_waiting: int, share: float) -> None:
    assert share_beside(num_running, num_waiting, CROWDED) == pytest.approx(share)
