"""Measures how many threads should compute, by decode steps of one sequence: at start and again while idle.

Takes a step, a function that sets the number of threads, and a clock. More threads than the memory can feed, or two on
one core's hyperthreads, gain nothing and take time from the other processes of the service. A start under load may
choose wrongly; this is corrected once the engine has been idle for a while.
"""

from collections.abc import Callable, Sequence

RUNS = 5
MAX_S = 0.5  # seconds of steps after which no further run is begun: enough for a large model
WORTH = 0.8  # fewer threads are taken if a step needs less than this share: a busy start must not cost half a machine
UNDONE = 0.9  # fewer threads are given up if they need more than this share; in between the number stays
AGREED = 3  # consecutive measurements that must favour the other number before it is taken
FIRST_S = 5.0  # seconds of idle time before the first measurement after start; doubled each time
LONGEST_S = 600.0
REST = 100  # pause after a measurement, as a multiple of its duration: 1 % of the time
STALE_S = 1.0  # a measurement that was interrupted for longer is restarted


def counts_of(most: int) -> tuple[int, ...]:
    """Returns the numbers of threads that are compared: `most` and half of it."""
    return tuple(sorted({most, max(1, most // 2)}, reverse=True))


class Measurement:
    """Times steps with each number of threads alternately, so that passing load affects both.

    Each number is judged by its best step, as nothing makes a step faster than it is.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.best = dict.fromkeys(counts, float("inf"))
        self.took_s = 0.0
        self._counts = tuple(counts)
        self._num_steps = 0

    @property
    def count(self) -> int:
        """The number of threads of the next step."""
        return self._counts[self._num_steps % len(self._counts)]

    @property
    def is_over(self) -> bool:
        """Whether enough was measured."""
        runs, rest = divmod(self._num_steps, len(self._counts))
        return rest == 0 and (runs >= RUNS or (runs > 0 and self.took_s > MAX_S))

    @property
    def again_s(self) -> float:
        """The seconds that as many steps take once everything is warm: the first steps at start read the weights in."""
        return self._num_steps * max(self.best.values())

    def note(self, step_s: float) -> None:
        """Records the seconds of the next step."""
        self.best[self.count] = min(self.best[self.count], step_s)
        self.took_s += step_s
        self._num_steps += 1

    def __str__(self) -> str:
        more, fewer = self._counts
        return f"a step of {self.best[more] * 1e3:.3g} ms, with {fewer} of {self.best[fewer] * 1e3:.3g} ms"


def _unheard(count: int, why: str) -> None:
    """Ignores a change: the default of `on_change`."""


class ThreadTuner:
    """Chooses the number of threads in use.

    Attributes:
        count: threads that compute.
        why: reason for this number.
        on_change: called with both when a measurement while idle has changed them.
    """

    def __init__(
        self,
        step: Callable[[], object],
        use: Callable[[int], object],
        counts: Sequence[int],
        why: str,
        clock: Callable[[], float],
    ) -> None:
        """Creates a tuner that does not measure before `start`.

        Args:
            use: sets the number of threads.
            counts: numbers of threads to compare, the largest first; a single one is not measured.
            why: where the first number comes from.
        """
        self.count, self.why = counts[0], why
        self.on_change: Callable[[int, str], None] = _unheard
        self._step, self._use, self._clock = step, use, clock
        self._counts, self._from = tuple(counts), why
        self._measurement: Measurement | None = None  # in progress
        self._last_s = 0.0  # when its last step ended
        self._num_against = 0  # consecutive measurements that favoured the other number
        self._interval_s = FIRST_S
        self._due_s = float("inf")

    def start(self) -> None:
        """Measures now and uses the result."""
        if len(self._counts) == 1:
            return
        measurement = Measurement(self._counts)
        while not measurement.is_over:
            self._measure(measurement)
        more, fewer = self._counts
        self._take(fewer if measurement.best[fewer] < WORTH * measurement.best[more] else more, str(measurement))
        self._rest(measurement.again_s)

    def idle(self) -> bool:
        """Measures one step if a measurement is due; returns whether it has more steps."""
        now = self._clock()
        if self._measurement is None or now - self._last_s > STALE_S:
            if now < self._due_s:
                return False
            self._measurement = Measurement(self._counts)
        self._measure(self._measurement)
        if self._measurement.is_over:
            self._judge(self._measurement)
            self._measurement = None
        return self._measurement is not None

    def _measure(self, measurement: Measurement) -> None:
        """Times one step and restores the number of threads."""
        self._use(measurement.count)
        try:
            begun = self._clock()
            self._step()
            self._last_s = self._clock()
            measurement.note(self._last_s - begun)
        finally:
            self._use(self.count)

    def _judge(self, measurement: Measurement) -> None:
        more, fewer = self._counts
        ratio = measurement.best[fewer] / measurement.best[more]
        is_against = ratio < WORTH if self.count == more else ratio > UNDONE
        self._num_against = self._num_against + 1 if is_against else 0
        if self._num_against == AGREED:
            self._take(fewer if self.count == more else more, f"measured while idle: {measurement}")
            self.on_change(self.count, self.why)
            self._num_against = 0
        self._interval_s = FIRST_S if is_against else min(2 * self._interval_s, LONGEST_S)
        self._rest(measurement.took_s)

    def _take(self, count: int, times: str) -> None:
        self.count, self.why = count, f"{self._from}; {times}"
        self._use(count)

    def _rest(self, cost_s: float) -> None:
        self._due_s = self._clock() + max(self._interval_s, REST * cost_s)
