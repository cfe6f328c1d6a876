"""The arithmetic of a load test: arrival times, latencies of one request, percentiles. Pure: no clock, no sockets."""

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSample:
    """One request, as measured by its client. Times in seconds on one clock; `error` is the name of a status code or
    "", `message` is the server's error message."""

    start: float
    arrivals: tuple[tuple[float, int], ...]  # (time, tokens) of each message
    end: float
    error: str = ""
    message: str = ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens received."""
        return sum(num for _, num in self.arrivals)


def arrival_times(num: int, rate: float, seed: int) -> list[float]:
    """Returns the start times of an open loop: Poisson arrivals at `rate` per second."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(num):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def random_prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    """Returns `length` random token ids."""
    return [rng.randrange(vocab) for _ in range(length)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, percentiles (nearest rank) and maximum; {} without values."""
    if not values:
        return {}
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    named = {f"p{round(share * 100)}": rank(share) for share in (0.5, 0.9, 0.99)}
    return {"mean": sum(ordered) / len(ordered), **named, "max": ordered[-1]}


def report(samples: Sequence[RequestSample]) -> dict[str, object]:
    """Returns the figures of a run: TTFT, ITL (time between messages), TPOT and end-to-end latency in ms; throughput
    in tokens/s."""
    good = [sample for sample in samples if not sample.error and sample.arrivals]
    bad = [sample for sample in samples if sample.error]
    took = max((s.end for s in samples), default=0.0) - min((s.start for s in samples), default=0.0)
    num_tokens = sum(sample.num_tokens for sample in good)
    return {
        "requests": len(samples),
        "errors": dict(collections.Counter(sample.error for sample in bad)),
        "first_errors": {sample.error: sample.message for sample in reversed(bad)},
        "duration_s": round(took, 4),
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / took, 2) if took > 0 else 0.0,
        "requests_per_s": round(len(good) / took, 3) if took > 0 else 0.0,
        "ttft_ms": _ms(summary([s.arrivals[0][0] - s.start for s in good])),
        "itl_ms": _ms(summary([gap for s in good for gap in _gaps(s)])),
        "tpot_ms": _ms(summary([tpot for s in good if (tpot := _tpot(s)) is not None])),
        "e2e_ms": _ms(summary([s.end - s.start for s in good])),
    }


def _gaps(sample: RequestSample) -> list[float]:
    times = [at for at, _ in sample.arrivals]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _tpot(sample: RequestSample) -> float | None:
    """Returns the time per output token after the first message; None without such tokens."""
    rest = sample.num_tokens - sample.arrivals[0][1]
    return (sample.arrivals[-1][0] - sample.arrivals[0][0]) / rest if rest else None


def _ms(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value * 1e3, 3) for name, value in values.items()}
