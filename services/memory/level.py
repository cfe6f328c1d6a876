"""Decides how much pressure there is from samples of memory: OK, WARN or CRITICAL. Pure: samples in, a level out.

The room is what is left up to the limit. A level is reached when the room is below its bound, or when it would be used
up within so many seconds at the present rate; it is left when both are well above their bounds for a while, so that a
level does not flap. It rises at once and falls one step at a time.
"""

import dataclasses
import enum
from collections import deque

WINDOW_S = 5.0  # of samples whose slope is the present rate
LEAST_SAMPLES = 4
EASED = 1.5  # a level is left when room and time are this many times above its bounds
WARN_S, CRITICAL_S = 10.0, 3.0  # seconds to exhaustion
NEVER_S = float("inf")


class Level(enum.IntEnum):
    """How much pressure there is."""

    OK = 0
    WARN = 1
    CRITICAL = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of room below which a level is reached, and the seconds for which it must be eased to be left."""

    warn: int
    critical: int
    hold_s: float = 5.0

    @staticmethod
    def of(limit: int, warn_share: float) -> "Bounds":
        """Returns the bounds for a limit: WARN at that share of it, of 4 GiB at most; CRITICAL at half of that."""
        warn = int(min(limit, 4 << 30) * warn_share)
        return Bounds(warn, warn // 2)


class Forecast:
    """The seconds until something is used up, by the slope of its use over the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, used: float) -> None:
        """Adds a sample."""
        self._samples.append((now_s, used))
        while now_s - self._samples[0][0] > self._window_s:
            self._samples.popleft()

    def seconds(self, room: float) -> float:
        """Returns after how many seconds the room is used up; infinity while use does not grow."""
        num = len(self._samples)
        if num < LEAST_SAMPLES:
            return NEVER_S
        mean_s = sum(at for at, _ in self._samples) / num
        mean = sum(used for _, used in self._samples) / num
        spread = sum((at - mean_s) ** 2 for at, _ in self._samples)
        slope = sum((at - mean_s) * (used - mean) for at, used in self._samples) / spread if spread else 0.0
        return max(room, 0.0) / slope if slope > 0 else NEVER_S


class PressureLevel:
    """The level of one process."""

    def __init__(self) -> None:
        self.level = Level.OK
        self.seconds_left = NEVER_S
        self._forecast = Forecast()
        self._eased_since_s: float | None = None

    def sample(self, now_s: float, used: int, limit: int, bounds: Bounds) -> Level:
        """Takes a sample; returns the level."""
        self._forecast.add(now_s, used)
        room = limit - used
        self.seconds_left = self._forecast.seconds(room)
        found = self._level(room, self.seconds_left, bounds, 1.0)
        if found >= self.level:
            self.level, self._eased_since_s = found, None
        elif self._level(room, self.seconds_left, bounds, EASED) >= self.level:
            self._eased_since_s = None
        elif self._eased_since_s is None:
            self._eased_since_s = now_s
        elif now_s - self._eased_since_s >= bounds.hold_s:
            self.level, self._eased_since_s = Level(self.level - 1), None
        return self.level

    def _level(self, room: int, seconds: float, bounds: Bounds, times: float) -> Level:
        """Returns the level for bounds that are multiplied. Time counts only where room is short too: a process that
        has just started grows fast."""
        if room < bounds.critical * times or (seconds < CRITICAL_S * times and room < 2 * bounds.warn * times):
            return Level.CRITICAL
        if room < bounds.warn * times or (seconds < WARN_S * times and room < 4 * bounds.warn * times):
            return Level.WARN
        return Level.OK
