"""Spans of one process, made after the fact from times that others measured, and sent to an OTLP collector.

Without an endpoint nothing is imported and nothing happens. A dead collector never slows anything: the queue is
bounded, spans beyond it are dropped. The RPC and GenAI spans of a gateway are made here too (`begin`, `finish`).
"""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
QUEUE_SIZE = 4096
EXPORT_DELAY_MS = 200


class Tracer:
    """Makes spans; does nothing when there is no provider."""

    def __init__(self, provider: "TracerProvider | None") -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("sluice", schema_url=names.SCHEMA_URL)

    @classmethod
    def create(cls, service_name: str, role: str, process_id: str, otlp_endpoint: str) -> "Tracer":
        """A tracer that exports to `otlp_endpoint`, or to the one that OpenTelemetry's variables name, or nowhere."""
        endpoint = otlp_endpoint or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), None)
        if not endpoint:
            return cls(None)
        # Here, because most processes of most deployments never need it and start faster without.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create(
            {"service.name": service_name, "service.instance.id": process_id, "sluice.role": role}
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=2)
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUE_SIZE, schedule_delay_millis=EXPORT_DELAY_MS)
        )
        return cls(provider)

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self._tracer is not None

    def record(
        self,
        name: str,
        traceparent: str,
        tracestate: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
    ) -> None:
        """A span that is over, under a remote parent. Times are wall-clock nanoseconds."""
        if self._tracer is None:
            return
        span = self._tracer.start_span(
            name, context=parent_context(traceparent, tracestate), start_time=start_ns, attributes=attributes
        )
        span.end(end_time=end_ns)

    def begin(self, name: str, parent: "Span | Context | None", kind: str, attributes: Attributes) -> "Span | None":
        """A span that goes on: kind is server or internal; parent a span of this process or a remote context."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import Span, SpanKind, set_span_in_context

        context = set_span_in_context(parent) if isinstance(parent, Span) else parent
        return self._tracer.start_span(name, context=context, kind=SpanKind[kind.upper()], attributes=attributes)

    def shutdown(self) -> None:
        """Send what is queued, for two seconds at most."""
        if self._provider is not None:
            self._provider.force_flush(2000)
            self._provider.shutdown()


def finish(span: "Span | None", attributes: Attributes, error: str) -> None:
    """End a span that `begin` made; `error` names what went wrong, or is empty."""
    if span is None:
        return
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(dict[str, Any](attributes))
    if error:
        span.set_attribute(names.ERROR_TYPE, error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(end_time=time.time_ns())


def traceparent_of(span: "Span | None", fallback: str) -> str:
    """The W3C header of a span; `fallback` when there is none."""
    if span is None:
        return fallback
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def parent_context(traceparent: str, tracestate: str) -> "Context":
    """The remote parent; an empty or malformed header gives a context without one, so that a new trace begins."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())
