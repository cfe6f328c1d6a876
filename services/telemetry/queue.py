"""The way of spans to a collector: a bounded queue in front of OTLP/gRPC, with counts of what became of them.

When the collector is dead or slow the newest spans are dropped and counted, silently and at once; nothing waits.
"""

import logging
import math
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

EXPORT_DELAY_MS = 200
EXPORT_TIMEOUT_S = 2
LAST_S = 2.0  # at the end, for what waits


class SpanQueue(SpanProcessor):
    """The batching processor, never asked for more than it has room for: full, it would log each span that it drops.

    `counts` has queued, dropped, exported and failed.
    """

    def __init__(self, exporter: SpanExporter, counts: dict[str, int], size: int) -> None:
        self._counts = counts
        self._size = size
        self._exporter = _Counted(exporter, counts)
        batch = min(512, size)
        self._batches = BatchSpanProcessor(self._exporter, size, EXPORT_DELAY_MS, batch)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue it, or drop and count it."""
        if self._counts["queued"] - self._exporter.num_taken >= self._size:
            self._counts["dropped"] += 1
            return
        self._counts["queued"] += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send what waits, for `LAST_S` and the batch that is on its way."""
        self._exporter.close_after(LAST_S)
        self._batches.shutdown()  # type: ignore[no-untyped-call] # the SDK's

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what waits, now."""
        return self._batches.force_flush(timeout_millis)


class _Counted(SpanExporter):
    """An exporter, and how many spans it was given and got rid of. Runs on the processor's thread."""

    def __init__(self, exporter: SpanExporter, counts: dict[str, int]) -> None:
        self.num_taken = 0
        self._exporter = exporter
        self._counts = counts
        self._until_s = math.inf
        self._is_failing = False

    def close_after(self, seconds: float) -> None:
        """Batches that come later than that fail at once."""
        self._until_s = time.monotonic() + seconds

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self.num_taken += len(spans)
        is_late = time.monotonic() > self._until_s
        result = SpanExportResult.FAILURE if is_late else self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning("spans do not reach the collector: until they do they are dropped and counted")
        self._is_failing = is_failing
        self._counts["exported" if result is SpanExportResult.SUCCESS else "failed"] += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the channel."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return True


def otlp_queue(endpoint: str, counts: dict[str, int], size: int) -> SpanQueue:
    """A queue of `size` spans to an OTLP/gRPC endpoint, http://host:port."""
    is_plain = not endpoint.startswith("https")
    return SpanQueue(OTLPSpanExporter(endpoint=endpoint, insecure=is_plain, timeout=EXPORT_TIMEOUT_S), counts, size)
