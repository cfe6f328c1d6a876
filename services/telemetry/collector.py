"""A small OTLP/gRPC receiver that keeps spans and metric points in memory, for `sluice demo` and for tests.

It implements the official protocol, so it receives what any collector would.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """One event of a span."""

    name: str
    at_ns: int
    attributes: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span, with the instance id of the process that made it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" for a root
    start_ns: int
    end_ns: int
    process: str
    is_error: bool
    attributes: dict[str, str]
    events: tuple[ReceivedEvent, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # trace and span id of each

    @property
    def took_ns(self) -> int:
        """The duration in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedPoint:
    """The latest value of one metric stream: a sum, a gauge, or a histogram's number of observations."""

    name: str
    process: str
    attributes: dict[str, str]
    value: float


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The receiver. Listens on a free port of `host` from construction until `stop`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._spans: list[ReceivedSpan] = []
        self._points: dict[tuple[object, ...], ReceivedPoint] = {}
        self._changed = Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call] # generated
        receiver = _Metrics(self._take_metrics)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, self._server)  # type: ignore[no-untyped-call] # generated
        self.port = self._server.add_insecure_port(f"{host}:0")
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._server.start()

    def Export(  # the protocol's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Receive spans."""
        received = [
            _span(span, _text(resource.resource.attributes, "service.instance.id"))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self._spans.extend(received)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, trace_id: str, names: set[str], timeout_s: float) -> list[ReceivedSpan]:
        """Returns the spans of a trace once all `names` are among them, or those received after `timeout_s`."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        return self.wait_until(lambda: names <= {span.name for span in found()}, found, timeout_s)

    def spans_named(self, name: str, timeout_s: float) -> list[ReceivedSpan]:
        """Returns the spans of a name, in any trace, once there is one; [] after `timeout_s`."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self._spans if span.name == name]

        return self.wait_until(lambda: bool(found()), found, timeout_s)

    def linked_to(self, context: tuple[str, str], timeout_s: float) -> list[ReceivedSpan]:
        """Returns the spans with a link to a trace and span id, once there is one; [] after `timeout_s`."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self._spans if context in span.links]

        return self.wait_until(lambda: bool(found()), found, timeout_s)

    def points(self, name: str) -> list[ReceivedPoint]:
        """Returns the latest point of each stream of a metric."""
        with self._changed:
            return [point for point in self._points.values() if point.name == name]

    def wait_until(
        self, met: Callable[[], bool], found: Callable[[], list[ReceivedSpan]], timeout_s: float
    ) -> list[ReceivedSpan]:
        """Returns `found()` once `met()` is true, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(met, timeout_s)
            return found()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop(0).wait()

    def _take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._changed:
            for resource in request.resource_metrics:
                process = _text(resource.resource.attributes, "service.instance.id")
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in _points(metric, process):
                            key = (point.name, process, *sorted(point.attributes.items()))
                            self._points[key] = point
            self._changed.notify_all()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Receives metrics. A class of its own, as both OTLP services name their method Export."""

    def __init__(self, take: Callable[[metrics_service_pb2.ExportMetricsServiceRequest], None]) -> None:
        self._take = take

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Receive metric points."""
        self._take(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _span(span: trace_pb2.Span, process: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        process=process,
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_texts(span.attributes),
        events=tuple(ReceivedEvent(one.name, one.time_unix_nano, _texts(one.attributes)) for one in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _points(metric: metrics_pb2.Metric, process: str) -> list[ReceivedPoint]:
    kind = metric.WhichOneof("data")
    if kind == "histogram":
        return [
            ReceivedPoint(metric.name, process, _texts(point.attributes), float(point.count))
            for point in metric.histogram.data_points
        ]
    points = metric.sum.data_points if kind == "sum" else metric.gauge.data_points
    return [
        ReceivedPoint(metric.name, process, _texts(point.attributes), point.as_double or float(point.as_int))
        for point in points
    ]


def _texts(attributes: object) -> dict[str, str]:
    return {pair.key: _text(attributes, pair.key) for pair in attributes}  # type: ignore[attr-defined] # a repeated field


def _text(attributes: object, key: str) -> str:
    for pair in attributes:  # type: ignore[attr-defined] # a repeated field
        if pair.key == key:
            kind = pair.value.WhichOneof("value")
            return str(getattr(pair.value, kind)) if kind else ""
    return ""
