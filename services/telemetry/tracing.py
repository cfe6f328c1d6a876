"""Makes the spans of one process from completed phases, and sends them to an OTLP collector.

Without an endpoint nothing is imported and nothing happens. Phases are put into a bounded queue as they are; the thread
that sends them encodes the spans. Phases of unsampled requests are held until they are wanted or too old.
"""

import collections
import dataclasses
import os
from collections.abc import Mapping

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.queue import DELAY_S, SpanQueue
from sluice_server.services.telemetry.spans import EndedSpan, Parent, SpanPlacement, is_sampled

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DISABLED_VARIABLE = "OTEL_SDK_DISABLED"
DELAY_VARIABLE = "OTEL_BSP_SCHEDULE_DELAY"  # ms
MAX_HELD_REQUESTS = 2048
MAX_HELD_PHASES = 64  # kept per request


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSampling:
    """Which requests are traced from the start, and which are kept in any case.

    Attributes:
        ratio: the share that is sampled of requests whose caller does not decide.
        slow_s: seconds from which on a request counts as slow, so that its spans are kept.
    """

    ratio: float = 1.0
    slow_s: float = 10.0

    def takes(self, trace_id: str) -> bool:
        """Whether a trace that begins here is sampled. It follows from the trace id, so all processes decide alike."""
        return self.ratio >= 1 or int(trace_id[-14:], 16) < self.ratio * (1 << 56)


EVERYTHING = TraceSampling()


class HeldSpans:
    """Phases of unsampled requests, held for a while in case a request turns out to be slow or failed.

    Bounded: the oldest request's phases are dropped first. Pure: no I/O, no clock.
    """

    def __init__(self, max_requests: int = MAX_HELD_REQUESTS) -> None:
        self.num_dropped = 0  # requests whose phases were dropped before they were taken
        self._max = max_requests
        self._phases: collections.OrderedDict[str, list[tuple[Parent, Phase]]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._phases)

    def add(self, request_id: str, parent: Parent, phase: Phase) -> None:
        """Hold one phase."""
        phases = self._phases.setdefault(request_id, [])
        if len(phases) < MAX_HELD_PHASES:
            phases.append((parent, phase))
        if len(self._phases) > self._max:
            self._phases.popitem(last=False)
            self.num_dropped += 1

    def take(self, request_id: str) -> list[tuple[Parent, Phase]]:
        """Remove and return the held phases of a request."""
        return self._phases.pop(request_id, [])


class Tracer:
    """Takes ended spans; without a queue it does nothing."""

    def __init__(self, queue: SpanQueue | None, sampling: TraceSampling = EVERYTHING) -> None:
        self.sampling = sampling
        self.held = HeldSpans()
        self.counts: dict[str, int] = {} if queue is None else queue.counts
        self._queue = queue

    @classmethod
    def create(cls, resource: Mapping[str, str], otlp_endpoint: str, sampling: TraceSampling = EVERYTHING) -> "Tracer":
        """Returns a tracer that exports to `otlp_endpoint`, else to OpenTelemetry's configured endpoint, if any.
        Raises ServiceError INVALID_SETTING for an invalid delay."""
        endpoint = endpoint_of(otlp_endpoint, ENDPOINT_VARIABLES)
        if not endpoint or os.environ.get(DISABLED_VARIABLE, "").strip().lower() == "true":
            return cls(None)
        # Imported here, as most processes do not need it and start faster without.
        from sluice_server.services.telemetry.span_export import SpanExport

        delay_s = _delay_s()
        return cls(SpanQueue(SpanExport(endpoint, resource), delay_s=delay_s), sampling)

    @property
    def is_on(self) -> bool:
        """Whether spans are exported."""
        return self._queue is not None

    @property
    def num_waiting(self) -> int:
        """The number of queued spans that the collector has not accepted yet."""
        return 0 if self._queue is None else self._queue.num_waiting

    def record(self, request_id: str, parent: Parent, phase: Phase) -> None:
        """Take a completed phase under a remote parent. It is held if its request is not sampled."""
        if self._queue is None:
            return
        if not is_sampled(parent.traceparent):
            self.held.add(request_id, parent, phase)
        else:
            self._queue.put(EndedSpan(phase, parent))

    def keep(self, request_id: str) -> None:
        """Send what is held of a request, which was slow or failed."""
        if self._queue is not None:
            for parent, phase in self.held.take(request_id):
                self._queue.put(EndedSpan(phase, parent))

    def record_placed(self, place: SpanPlacement, phase: Phase, *, is_server: bool = False) -> None:
        """Take an ended span whose place is already fixed, as other processes may refer to it."""
        if self._queue is not None:
            self._queue.put(EndedSpan(phase, place, is_server))

    def figures(self) -> list[MetricSample]:
        """Returns the counts of spans by outcome; [] without a queue."""
        if self._queue is None:
            return []
        counts = {**self.counts, "held_dropped": self.held.num_dropped}
        return [MetricSample(catalogue.SPANS, num, (outcome,)) for outcome, num in counts.items()]

    def shutdown(self) -> None:
        """Send what is queued, for a few seconds at most."""
        if self._queue is not None:
            self._queue.shutdown()


def endpoint_of(configured: str, variables: tuple[str, ...]) -> str:
    """Returns the configured endpoint, else the one in OpenTelemetry's own variables, else ""."""
    return configured or next(filter(None, map(os.environ.get, variables)), "")


def _delay_s() -> float:
    text = os.environ.get(DELAY_VARIABLE, "")
    if text and not (text.isdecimal() and int(text)):
        why = f"{DELAY_VARIABLE}: {text!r} is not a number of milliseconds above 0"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", why, field=DELAY_VARIABLE)
    return int(text) / 1e3 if text else DELAY_S
