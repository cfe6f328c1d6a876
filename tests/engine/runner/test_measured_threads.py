"""Threads are measured with a clock that a step moves."""

import pytest

from engine.runner.threads import MAX_S, RUNS, measure_threads


class Machine:
    """Steps take what the number of threads says; the first of each number takes longer."""

    def __init__(self, step_s: dict[int, float]) -> None:
        self.now = 0.0
        self.used: list[int] = []
        self._step_s = step_s
        self._steps: dict[int, int] = {}

    def step(self) -> None:
        count = self.used[-1]
        self._steps[count] = self._steps.get(count, 0) + 1
        self.now += self._step_s[count] * (10.0 if self._steps[count] == 1 else 1.0)

    def measure(self, most: int) -> tuple[int, str]:
        return measure_threads(self.step, self.used.append, most, lambda: self.now)


@pytest.mark.parametrize(
    ("step_s", "chosen"),
    [
        ({8: 0.002, 4: 0.003}, 8),
        ({8: 0.002, 4: 0.0019}, 8),  # hardly faster: a busy moment may look so
        ({8: 0.002, 4: 0.0015}, 4),
        ({2: 0.002, 1: 0.001}, 1),
        ({3: 0.001, 1: 0.002}, 3),
    ],
)
def test_fewer_threads_are_used_where_they_are_clearly_faster(step_s: dict[int, float], chosen: int) -> None:
    machine = Machine(step_s)
    found, why = machine.measure(max(step_s))
    assert found == chosen == machine.used[-1]
    assert len(machine.used) == 2 * RUNS + 1
    assert f"{step_s[max(step_s)] * 1e3:.3g} ms" in why and f"{step_s[min(step_s)] * 1e3:.3g} ms" in why


def test_one_core_leaves_nothing_to_choose() -> None:
    machine = Machine({})
    assert machine.measure(1) == (1, "")
    assert not machine.used


def test_slow_steps_are_few() -> None:
    machine = Machine({2: MAX_S, 1: MAX_S})
    assert machine.measure(2)[0] == 2
    assert machine.used == [2, 1, 2]
