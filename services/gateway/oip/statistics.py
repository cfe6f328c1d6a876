"""Counts the generations that a gateway has ended, over whatever protocol they came, for ModelStatistics.

An observer in front of another one: the request manager knows nothing of it.
"""

import time
from collections.abc import Callable

from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.messages.work import Generate
from sluice_server.services.telemetry.observed import (
    Observer,
    RefusedRequest,
    RequestTrace,
    RequestUsage,
    StartedRequest,
)

NS = 1_000_000_000


class GenerationCounts:
    """Counts generations, and passes everything on to another observer."""

    def __init__(
        self,
        inner: Observer,
        clock: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`clock` measures durations; `now_s` gives the seconds since 1970."""
        self._inner = inner
        self._clock = clock
        self._now_s = now_s
        self._found = oip.ModelStatistics(inference_stats=oip.InferStatistics())

    def statistics(self, name: str, version: str) -> oip.ModelStatistics:
        """Returns a copy of the counts, under the name of the model."""
        found = oip.ModelStatistics(name=name, version=version)
        found.MergeFrom(self._found)
        return found

    def request_started(self, started: StartedRequest) -> RequestTrace:
        """Returns a trace whose end is counted, if the request generates."""
        trace = self._inner.request_started(started)
        return _CountedTrace(trace, self, self._clock) if isinstance(started.work, Generate) else trace

    def refused(self, refused: RefusedRequest) -> str:
        """Pass it on: what was not admitted is no inference."""
        return self._inner.refused(refused)

    def count(self, name: str, **labels: str) -> None:
        """Pass it on."""
        self._inner.count(name, **labels)

    def ended(self, *, is_success: bool, took_s: float, used: RequestUsage) -> None:
        """Count a generation; its phases only where it succeeded, as Triton does."""
        found, stats = self._found, self._found.inference_stats
        _add(stats.success if is_success else stats.fail, took_s)
        if not is_success:
            return
        found.last_inference = int(self._now_s() * 1000)
        found.inference_count += 1
        found.execution_count += 1
        if used.timings is not None:
            spent = used.timings
            _add(stats.queue, spent.queue_s)
            _add(stats.compute_input, spent.tokenize_s)
            _add(stats.compute_infer, spent.prefill_s + spent.decode_s)
            _add(stats.compute_output, spent.detokenize_s)


class _CountedTrace:
    """The trace of one generation."""

    def __init__(self, inner: RequestTrace, counts: GenerationCounts, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._counts = counts
        self._clock = clock
        self._start_s = clock()
        self.traceparent = inner.traceparent
        self.first_token = inner.first_token
        self.happened = inner.happened

    def ended(self, status_code: int, reason: str, used: RequestUsage) -> None:
        """Count the end and pass it on."""
        self._counts.ended(is_success=status_code == 0, took_s=self._clock() - self._start_s, used=used)
        self._inner.ended(status_code, reason, used)


def _add(total: oip.StatisticDuration, took_s: float) -> None:
    total.count += 1
    total.ns += round(took_s * NS)
