"""Spans of one process, told after the fact from phases that others measured, and sent to an OTLP collector.

Without an endpoint nothing is imported and nothing happens. What is over is put into a bounded queue as it is; spans
are made of it in the thread that sends them. What was not sampled waits (`held`) until somebody wants it or it is too
old.
"""

import dataclasses
import os
from collections.abc import Mapping

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.held import HeldSpans
from sluice_server.services.telemetry.metrics import MetricSample
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.queue import DELAY_S, SpanQueue
from sluice_server.services.telemetry.spans import Ended, Parent, SpanPlacement, is_sampled

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DISABLED_VARIABLE = "OTEL_SDK_DISABLED"
DELAY_VARIABLE = "OTEL_BSP_SCHEDULE_DELAY"  # ms


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSampling:
    """Which requests are traced from the start: a share of those whose caller does not say; and from how many seconds
    on a request counts as slow, so that its spans are kept in any case."""

    ratio: float = 1.0
    slow_s: float = 10.0

    def takes(self, trace_id: str) -> bool:
        """Whether a trace that begins here is sampled: told from its id, so that everybody would say the same."""
        return int(trace_id[-14:], 16) < self.ratio * (1 << 56)


EVERYTHING = TraceSampling()


class Tracer:
    """Takes spans that are over; does nothing when there is no queue."""

    def __init__(self, queue: SpanQueue | None, sampling: TraceSampling = EVERYTHING) -> None:
        self.sampling = sampling
        self.held = HeldSpans()
        self.counts: dict[str, int] = {} if queue is None else queue.counts
        self._queue = queue

    @classmethod
    def create(cls, resource: Mapping[str, str], otlp_endpoint: str, sampling: TraceSampling = EVERYTHING) -> "Tracer":
        """A tracer that exports to `otlp_endpoint`, or to the one that OpenTelemetry's variables name, or nowhere.
        Raises ServiceError for a delay that is none."""
        endpoint = endpoint_of(otlp_endpoint, ENDPOINT_VARIABLES)
        if not endpoint or os.environ.get(DISABLED_VARIABLE, "").strip().lower() == "true":
            return cls(None)
        # Here, because most processes of most deployments never need it and start faster without.
        from sluice_server.services.telemetry.span_export import SpanExport

        delay_s = _delay_s()
        return cls(SpanQueue(SpanExport(endpoint, resource), delay_s=delay_s), sampling)

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self._queue is not None

    @property
    def num_waiting(self) -> int:
        """Spans that the collector has not taken yet."""
        return 0 if self._queue is None else self._queue.num_waiting

    def record(self, request_id: str, parent: Parent, phase: Phase) -> None:
        """A phase that is over, under a remote parent; held back when its request is not sampled."""
        if self._queue is None:
            return
        if not is_sampled(parent.traceparent):
            self.held.add(request_id, parent, phase)
        else:
            self._queue.put(Ended(phase, parent))

    def keep(self, request_id: str) -> None:
        """The request was slow or failed: send what is held of it."""
        if self._queue is not None:
            for parent, phase in self.held.take(request_id):
                self._queue.put(Ended(phase, parent))

    def tell(self, place: SpanPlacement, phase: Phase, *, is_server: bool = False) -> None:
        """A span that is over and whose place others may know already."""
        if self._queue is not None:
            self._queue.put(Ended(phase, place, is_server))

    def figures(self) -> list[MetricSample]:
        """What became of spans; nothing where there are none."""
        if self._queue is None:
            return []
        counts = {**self.counts, "held_dropped": self.held.num_dropped}
        return [MetricSample(catalogue.SPANS, num, (outcome,)) for outcome, num in counts.items()]

    def shutdown(self) -> None:
        """Send what is queued, for a few seconds at most."""
        if self._queue is not None:
            self._queue.shutdown()


def endpoint_of(configured: str, variables: tuple[str, ...]) -> str:
    """Where to send: what is configured, else what OpenTelemetry's own variables name, else nowhere."""
    return configured or next(filter(None, map(os.environ.get, variables)), "")


def _delay_s() -> float:
    text = os.environ.get(DELAY_VARIABLE, "")
    if text and not (text.isdecimal() and int(text)):
        why = f"{DELAY_VARIABLE}: {text!r} is not a number of milliseconds above 0"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", why, field=DELAY_VARIABLE)
    return int(text) / 1e3 if text else DELAY_S
