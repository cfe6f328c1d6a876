"""Metric samples of a process's sockets and event loop."""

from collections.abc import Iterator

from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample

OUT = ("frames", "blobs", "would_block", "oversize", "backlog_full")
IN = ("frames", "malformed", "other_schema", "stale", "repeated", "lost", "lost_blobs")
EVENTS = ("messages", "dropped", "unroutable", "handler_errors")


def figures(ring: RingLoop) -> Iterator[MetricSample]:
    """Yields all samples. Counters at zero are included, so that an alert on an event that never happened has a
    first value."""
    for what in IN:
        yield MetricSample(catalogue.RING_IN, ring.inbox.counts[what], (what,))
    for what in EVENTS:
        yield MetricSample(catalogue.RING, ring.counts[what], (what,))
    for what in OUT:
        yield MetricSample(catalogue.RING_OUT, sum(outbox.counts[what] for outbox in ring.outboxes.values()), (what,))
    yield MetricSample(catalogue.LAG, ring.inbox.lag.snapshot())
