"""The measurement of compute threads, with a clock that each step advances."""

import itertools

import pytest

from sluice_server.engine.worker.host.threads import (
    FIRST_S,
    LONGEST_S,
    MAX_S,
    REST,
    RUNS,
    STALE_S,
    ThreadTuner,
    counts_of,
)

QUIET = {8: 0.002, 4: 0.003}
NOISY = {8: 0.005, 4: 0.003}  # others take time from some of the threads


class Machine:
    """A machine whose step time depends on the number of threads; the first step of each number takes longer."""

    def __init__(self, step_s: dict[int, float], counts: tuple[int, ...] = ()) -> None:
        self.now = 0.0
        self.used: list[int] = []
        self.step_s = step_s
        self.at_s: list[float] = []  # when each step began
        self.told: list[tuple[int, str]] = []
        self._steps: dict[int, int] = {}
        counts = counts or counts_of(max(step_s))
        self.tuner = ThreadTuner(self.step, self.used.append, counts, "8 cores", lambda: self.now)
        self.tuner.on_change = lambda count, why: self.told.append((count, why))

    @property
    def num_steps(self) -> int:
        return len(self.at_s)

    def step(self) -> None:
        count = self.used[-1]
        self.at_s.append(self.now)
        self._steps[count] = self._steps.get(count, 0) + 1
        self.now += self.step_s[count] * (10.0 if self._steps[count] == 1 else 1.0)

    def idle_for(self, seconds: float, poll_s: float = 0.25) -> None:
        """Runs an idle engine's loop for that many seconds."""
        end = self.now + seconds
        while self.now < end:
            if not self.tuner.idle():
                self.now += poll_s


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
    machine.tuner.start()
    assert machine.tuner.count == chosen == machine.used[-1]
    assert machine.num_steps == 2 * RUNS
    assert f"{step_s[max(step_s)] * 1e3:.3g} ms" in machine.tuner.why
    assert f"{step_s[min(step_s)] * 1e3:.3g} ms" in machine.tuner.why


@pytest.mark.parametrize("counts", [counts_of(1), (6,)])
def test_a_number_without_another_or_asked_for_is_not_measured(counts: tuple[int, ...]) -> None:
    machine = Machine({}, counts)
    machine.tuner.start()
    machine.idle_for(100.0)
    assert (machine.tuner.count, machine.tuner.why, machine.num_steps) == (counts[0], "8 cores", 0)


def test_slow_steps_are_few() -> None:
    machine = Machine({2: MAX_S, 1: MAX_S})
    machine.tuner.start()
    assert machine.tuner.count == 2 and machine.num_steps == 2


def test_a_start_in_noise_ends_at_the_right_number_after_idle_time() -> None:
    machine = Machine(NOISY)
    machine.tuner.start()
    assert machine.tuner.count == 4
    machine.idle_for(30.0)
    assert machine.tuner.count == 4 and not machine.told
    machine.step_s = QUIET
    machine.idle_for(90.0)
    assert machine.tuner.count == 8 == machine.used[-1]
    assert machine.told == [(8, "8 cores; measured while idle: a step of 2 ms, with 4 of 3 ms")]
    assert machine.tuner.why == machine.told[0][1]


def test_two_measurements_in_a_row_change_nothing() -> None:
    machine = Machine(QUIET)
    machine.tuner.start()
    for step_s in (NOISY, NOISY, QUIET) * 4:
        machine.step_s = step_s
        before = machine.num_steps
        while machine.num_steps < before + 2 * RUNS:
            machine.idle_for(0.25)
    assert machine.tuner.count == 8 and not machine.told


@pytest.mark.parametrize("start", [{8: 0.002, 4: 0.001}, {8: 0.001, 4: 0.002}])
def test_a_number_that_is_about_as_good_stays(start: dict[int, float]) -> None:
    machine = Machine(start)
    machine.tuner.start()
    chosen = machine.tuner.count
    machine.step_s = {8: 0.002, 4: 0.0017}
    machine.idle_for(3600.0)
    assert machine.tuner.count == chosen and not machine.told


@pytest.mark.parametrize("step_s", [0.0001, 0.01, 3.0])
def test_measuring_takes_a_hundredth_of_idle_time_at_most_and_backs_off(step_s: float) -> None:
    machine = Machine({2: step_s, 1: step_s})
    machine.tuner.start()
    machine.at_s.clear()
    begun = machine.now
    machine.idle_for(4 * 3600.0)
    assert len(machine.at_s) * step_s <= 1.05 / REST * (machine.now - begun)
    gaps = [later - earlier for earlier, later in itertools.pairwise([begun, *machine.at_s])]
    assert gaps[0] <= FIRST_S + 1.0 + REST * 2 * 10.0 * step_s  # two cold steps at least were measured at start
    assert LONGEST_S <= max(gaps[1:]) < 2 * LONGEST_S


def test_each_call_is_one_step_and_leaves_the_number_in_use() -> None:
    """A request waits for at most one step, and is computed with the chosen number of threads."""
    machine = Machine(NOISY)
    machine.tuner.start()
    machine.now += FIRST_S + 10.0
    for done in range(1, 2 * RUNS + 1):
        before = machine.num_steps
        assert machine.tuner.idle() is (done < 2 * RUNS)
        assert machine.num_steps == before + 1 and machine.used[-1] == machine.tuner.count
    assert not machine.tuner.idle()


def test_a_measurement_that_was_interrupted_begins_anew() -> None:
    machine = Machine(QUIET)
    machine.tuner.start()
    machine.now += FIRST_S + 10.0
    assert machine.tuner.idle()
    machine.now += STALE_S + 1.0  # requests were computed
    before = machine.num_steps
    while machine.tuner.idle():
        pass
    assert machine.num_steps == before + 2 * RUNS


def test_a_step_that_fails_leaves_the_number_in_use() -> None:
    machine = Machine(QUIET)
    machine.tuner.start()
    machine.now += FIRST_S + 10.0
    assert machine.tuner.idle()
    del machine.step_s[4]
    with pytest.raises(KeyError):
        machine.tuner.idle()
    assert machine.used[-1] == machine.tuner.count == 8
