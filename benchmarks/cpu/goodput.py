"""The arithmetic of load tests with goals: what a trial has shown, the highest rate that keeps them, and how soon a
burst is over. Pure: no clock, no sockets."""

import dataclasses
import math
from collections.abc import Callable, Sequence

SHARE = 0.95  # of the requests must keep a goal


@dataclasses.dataclass(slots=True)
class Flight:
    """A request on its way: when it was due to begin, its first token and its end, in seconds of one clock; inf for
    what has not been. The time it waited for its turn to be sent counts. `error`: why it was refused or broke off."""

    due: float
    num_tokens: int
    first: float = math.inf
    end: float = math.inf
    error: str = ""

    @property
    def ttft(self) -> float:
        """The time to the first token."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """The time per token behind the first."""
        return (self.end - self.first) / (self.num_tokens - 1) if math.isfinite(self.end) else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Goals:
    """What a good request keeps, in seconds."""

    ttft: float = 0.2
    tpot: float = 0.05

    def keeps(self, flight: Flight) -> bool:
        """Whether a request keeps both."""
        return flight.ttft < self.ttft and flight.tpot < self.tpot

    def num_late(self, flights: Sequence[Flight], now: float) -> int:
        """The requests of which it is certain by now that their first token is too late."""
        return sum(min(flight.first, now) - flight.due >= self.ttft for flight in flights)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What a rate has shown. `num`: the requests that were to be sent; those that were not, after the trial had been
    given up, are none that are good."""

    rate: float
    num: int
    ttft_p50: float
    ttft_p95: float
    tpot_p95: float
    goodput: float
    errors: int
    passes: bool


def trial_of(rate: float, num: int, seconds: float, flights: Sequence[Flight], goals: Goals) -> Trial:
    """What was measured at a rate, of `num` requests in so many seconds. The ones that did not end are the slowest."""
    missing = [math.inf] * (num - len(flights))
    ttfts = [flight.ttft for flight in flights] + missing
    ttft, tpot = quantile(ttfts, SHARE), quantile([flight.tpot for flight in flights] + missing, SHARE)
    good = sum(goals.keeps(flight) for flight in flights)
    passes = ttft < goals.ttft and tpot < goals.tpot
    errors = sum(bool(flight.error) for flight in flights)
    return Trial(rate, num, quantile(ttfts, 0.5), ttft, tpot, good / seconds, errors, passes)


def quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank; nan without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def highest(passes: Callable[[float], bool], start: float, *, widen: float = 1.25, ratio: float = 1.06) -> float:
    """The highest rate that passes, within `ratio`: steps of `widen` from `start` until one passes and one does not,
    then halves of what is between. 0 if even a 64th of the start does not. A rate fails if it does not pass twice:
    one short trial may be disturbed, and would end the search where it is."""
    low, high, rate = 0.0, math.inf, start
    while not low or math.isinf(high):
        if passes(rate) or passes(rate):
            low = rate
        else:
            high = rate
        if high < start / 64:
            return 0.0
        rate = high / widen if not low else low * widen
    while high / low > ratio:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) or passes(middle) else (low, middle)
    return low


def burst_times(base: Sequence[float], burst: Sequence[float], start: float) -> list[float]:
    """Arrivals at the usual rate, and those of a burst that begins at `start`, as one."""
    return sorted([*base, *(start + at for at in burst)])


def over_after(flights: Sequence[Flight], end: float, goal: float) -> float:
    """Seconds behind a burst's end until every request that begins later has its first token within `goal`."""
    return max((flight.due - end for flight in flights if flight.due > end and flight.ttft >= goal), default=0.0)
