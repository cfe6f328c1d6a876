"""A small OTLP/gRPC trace receiver that keeps spans in memory: for `sluice demo`, and for tests that assert trees.

Speaks the official protocol, so that what it receives is what any collector would.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span, with the instance (process) that made it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" for a root
    start_ns: int
    end_ns: int
    process: str
    is_error: bool
    attributes: dict[str, str]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of 127.0.0.1 from construction until `stop`."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._changed = Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call] # generated
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
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
        """Spans of a trace once all `names` are among them, or what there is after `timeout_s`."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self._changed:
            self._changed.wait_for(lambda: names <= {span.name for span in found()}, timeout_s)
            return found()

    def stop(self) -> None:
        """Close."""
        self._server.stop(0).wait()


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
        attributes={pair.key: _text(span.attributes, pair.key) for pair in span.attributes},
    )


def _text(attributes: object, key: str) -> str:
    for pair in attributes:  # type: ignore[attr-defined] # a repeated field
        if pair.key == key:
            kind = pair.value.WhichOneof("value")
            return str(getattr(pair.value, kind)) if kind else ""
    return ""
