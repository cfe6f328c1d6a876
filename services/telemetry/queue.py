"""The way of spans to a collector: a bounded queue in front of OTLP/gRPC, with counts of what became of them.

When the collector is dead or slow the newest spans are dropped and counted, silently and at once; nothing waits. What
is sent holds the interpreter while it is encoded, a tenth of a millisecond a span: batches are small, and a collector
that does not answer is tried with one span at a time.
"""

import logging
import math
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from services.telemetry.tracing import waiting

logger = logging.getLogger(__name__)

EXPORT_DELAY_MS = 200
MAX_BATCH = 32  # spans encoded in one go: a step that runs meanwhile waits for so many
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
        self._batches = BatchSpanProcessor(self._exporter, size, EXPORT_DELAY_MS, min(MAX_BATCH, size))

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue it, or drop and count it."""
        if waiting(self._counts) >= self._size:
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
    """An exporter, and how many spans it got rid of. Runs on the processor's thread."""

    def __init__(self, exporter: SpanExporter, counts: dict[str, int]) -> None:
        self._exporter = exporter
        self._counts = counts
        self._until_s = math.inf
        self._is_failing = False
        self._most = 1  # spans sent in one go: doubles with each success, and begins again after a failure

    def close_after(self, seconds: float) -> None:
        """Batches that come later than that fail at once."""
        self._until_s = time.monotonic() + seconds

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, all of it or what goes before the first failure."""
        num_sent = 0
        while num_sent < len(spans):
            part = spans[num_sent : num_sent + self._most]
            is_late = time.monotonic() > self._until_s
            if is_late or self._exporter.export(part) is not SpanExportResult.SUCCESS:
                return self._fail(len(spans) - num_sent)
            num_sent += len(part)
            self._counts["exported"] += len(part)
            self._most = min(2 * self._most, MAX_BATCH)
            self._is_failing = False
        return SpanExportResult.SUCCESS

    def _fail(self, num: int) -> SpanExportResult:
        if not self._is_failing:
            logger.warning("spans do not reach the collector: until they do they are dropped and counted")
        self._is_failing = True
        self._most = 1
        self._counts["failed"] += num
        return SpanExportResult.FAILURE

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
