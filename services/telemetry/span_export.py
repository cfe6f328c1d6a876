"""Sends batches of spans to an OTLP/gRPC collector with the SDK's exporter and our encoder.

Imported only if an endpoint is set. Encoding holds the interpreter lock, which delays a step that runs meanwhile; so it
pauses after every `SLICE` spans.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.export import SpanExportResult

from sluice_server.services.telemetry.otlp_channel import CHANNEL_OPTIONS
from sluice_server.services.telemetry.span_encoder import SpanEncoder
from sluice_server.services.telemetry.spans import EndedSpan

EXPORT_TIMEOUT_S = 2
# Spans encoded without a pause: half a millisecond. After a pause, caches lack the encoder's code and data: beside a
# thread that clears them, a span takes 7.6 µs with 32, 4.0 with 128, 3.0 without pauses.
SLICE = 128
PAUSE_S = 0.0005  # between two slices
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class SpanExport:
    """Exports the spans of one process to `endpoint`, http://host:port or https://, under the process's `resource`."""

    def __init__(self, endpoint: str, resource: Mapping[str, str]) -> None:
        is_plain = not endpoint.startswith("https")
        self._exporter = _Exporter(
            endpoint=endpoint, insecure=is_plain, timeout=EXPORT_TIMEOUT_S, channel_options=CHANNEL_OPTIONS
        )
        self._encoder = SpanEncoder(Resource.create(resource), SpanLimits())

    def send(self, batch: Sequence[EndedSpan]) -> bool:
        """Send a batch. Returns whether the collector accepted all of it. Waits at most `EXPORT_TIMEOUT_S` for each
        request of it, of which there is one unless its spans are large."""
        return all(self._exporter.send(one) for one in self._encoder.requests(_with_pauses(batch)))

    def close(self) -> None:
        """Close the channel; a request in progress is not retried."""
        self._exporter.shutdown()


class _Exporter(OTLPSpanExporter):
    """The SDK's exporter, with its variables, credentials and retries, for requests that are bytes already."""

    def send(self, request: bytes) -> bool:
        """Send a request. Returns whether it was accepted."""
        return self.export(request) is SpanExportResult.SUCCESS  # type: ignore[arg-type] # SDK spans there

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call] # the SDK's
        assert self._channel is not None
        self._client = _Stub(self._channel)

    def _translate_data(self, data: bytes) -> bytes:  # type: ignore[override] # SDK spans there
        return data

    def _count_data(self, data: bytes) -> int:  # type: ignore[override] # the same
        return 1  # for metrics of the SDK about itself, which are off


class _Stub:
    """The collector's service, for requests that are bytes already."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)  # the name the SDK calls


def _with_pauses(batch: Sequence[EndedSpan]) -> Iterator[EndedSpan]:
    for start in range(0, len(batch), SLICE):
        if start:
            time.sleep(PAUSE_S)
        yield from batch[start : start + SLICE]
