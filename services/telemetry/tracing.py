"""Spans of one process, made after the fact from phases that others measured, and sent to an OTLP collector.

Without an endpoint nothing is imported and nothing happens. A dead collector never slows anything: the queue is
bounded, spans beyond it are dropped and counted. What was not sampled waits (`held`) until somebody wants it or it is
too old. The RPC and GenAI spans of a gateway are made here too (`begin`, `finish`).
"""

import dataclasses
import functools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.telemetry import catalogue, names
from services.telemetry.held import Held, Parent
from services.telemetry.metrics import Sample
from services.telemetry.phases import Happening, Phase, Value

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link, Span

Attributes = Mapping[str, Value | tuple[str, ...]]

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
QUEUE_SIZE = 4096  # spans that wait for the collector
SAMPLED = "01"
NOT_SAMPLED = "00"


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """Which requests are traced from the start: a share of those whose caller does not say; and from how many seconds
    on a request counts as slow, so that its spans are kept in any case."""

    ratio: float = 1.0
    slow_s: float = 10.0

    def takes(self, trace_id: str) -> bool:
        """Whether a trace that begins here is sampled: told from its id, so that everybody would say the same."""
        return int(trace_id[-14:], 16) < self.ratio * (1 << 56)


EVERYTHING = Sampling()


class Tracer:
    """Makes spans; does nothing when there is no provider."""

    def __init__(self, provider: "TracerProvider | None", sampling: Sampling = EVERYTHING) -> None:
        self.sampling = sampling
        self.held = Held()
        self.counts: dict[str, int] = {"queued": 0, "dropped": 0, "exported": 0, "failed": 0}
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("sluice", schema_url=names.SCHEMA_URL)
        # Read once, so that spans that touch do so exactly.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    @classmethod
    def create(cls, resource: Mapping[str, str], otlp_endpoint: str, sampling: Sampling = EVERYTHING) -> "Tracer":
        """A tracer that exports to `otlp_endpoint`, or to the one that OpenTelemetry's variables name, or nowhere."""
        endpoint = endpoint_of(otlp_endpoint, ENDPOINT_VARIABLES)
        if not endpoint:
            return cls(None)
        # Here, because most processes of most deployments never need it and start faster without.
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        from services.telemetry.queue import otlp_queue

        # Who is sampled was decided before: what comes here is wanted.
        provider = TracerProvider(resource=Resource.create(resource), sampler=ALWAYS_ON, shutdown_on_exit=False)
        tracer = cls(provider, sampling)
        provider.add_span_processor(otlp_queue(endpoint, tracer.counts, QUEUE_SIZE))
        return tracer

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self._tracer is not None

    @property
    def num_waiting(self) -> int:
        """Spans that the collector has not taken yet."""
        return waiting(self.counts)

    def record(self, request_id: str, parent: Parent, phase: Phase) -> None:
        """A phase that is over, under a remote parent; held back when its request is not sampled."""
        if self._tracer is None:
            return
        if parent.traceparent.endswith(NOT_SAMPLED):
            self.held.add(request_id, parent, phase)
        else:
            self._make(parent, phase)

    def keep(self, request_id: str) -> None:
        """The request was slow or failed: send what is held of it."""
        for parent, phase in self.held.take(request_id):
            self._make(parent, phase)

    def begin(self, name: str, parent: "Span | Context | None", kind: str, attributes: Attributes) -> "Span | None":
        """A span that goes on: kind is server or internal; parent a span of this process or a remote context."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import Span, SpanKind, set_span_in_context

        context = set_span_in_context(parent) if isinstance(parent, Span) else parent
        return self._tracer.start_span(name, context=context, kind=SpanKind[kind.upper()], attributes=attributes)

    def figures(self) -> list[Sample]:
        """What became of spans; nothing where there are none."""
        if self._tracer is None:
            return []
        counts = {**self.counts, "held_dropped": self.held.num_dropped}
        return [Sample(catalogue.SPANS, num, (outcome,)) for outcome, num in counts.items()]

    def shutdown(self) -> None:
        """Send what is queued, for a few seconds at most."""
        if self._provider is not None:
            self._provider.shutdown()

    def _make(self, parent: Parent, phase: Phase) -> None:
        assert self._tracer is not None
        if self.num_waiting >= QUEUE_SIZE:  # it would be dropped: making it costs more than its step can spare
            self.counts["dropped"] += 1
            return
        span = self._tracer.start_span(
            phase.name,
            context=parent_context(*parent),
            start_time=self._wall_ns(phase.start_s),
            attributes=phase.attributes,
            links=[link for header in phase.links if (link := _link(header)) is not None],
        )
        for happening in phase.happenings:
            self._add(span, happening)
        if phase.error:
            _fail(span, phase.error)
        span.end(end_time=self._wall_ns(phase.end_s))

    def _add(self, span: "Span", happening: Happening) -> None:
        span.add_event(happening.name, dict(happening.attributes), self._wall_ns(happening.at_s))

    def _wall_ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns


def waiting(counts: Mapping[str, int]) -> int:
    """Of spans by what became of them: those that are queued or on their way."""
    return counts["queued"] - counts["exported"] - counts["failed"]


def finish(span: "Span | None", attributes: Attributes, error: str) -> None:
    """End a span that `begin` made; `error` names what went wrong, or is empty."""
    if span is None:
        return
    span.set_attributes(dict[str, Any](attributes))
    if error:
        _fail(span, error)
    span.end(end_time=time.time_ns())


def traceparent_of(span: "Span | None", fallback: str, *, is_sampled: bool = True) -> str:
    """The W3C header of a span; `fallback` when there is none."""
    if span is None:
        return fallback
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{SAMPLED if is_sampled else NOT_SAMPLED}"


def trace_id_of(span: "Span") -> str:
    """In hex."""
    return f"{span.get_span_context().trace_id:032x}"


@functools.lru_cache(maxsize=256)  # the phases of a request have one parent, and reading it is a sixth of a span's cost
def parent_context(traceparent: str, tracestate: str) -> "Context":
    """The remote parent; an empty or malformed header gives a context without one, so that a new trace begins."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def endpoint_of(configured: str, variables: tuple[str, ...]) -> str:
    """Where to send: what is configured, else what OpenTelemetry's own variables name, else nowhere."""
    return configured or next(filter(None, map(os.environ.get, variables)), "")


def _fail(span: "Span", error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute(names.ERROR_TYPE, error)
    span.set_status(Status(StatusCode.ERROR, error))


def _link(traceparent: str) -> "Link | None":
    from opentelemetry.trace import Link, get_current_span

    context = get_current_span(parent_context(traceparent, "")).get_span_context()
    return Link(context) if context.is_valid else None
