"""Metric samples of a process's sockets and event loop."""

from collections.abc import Iterator, Sequence

from sluice_server.engine.scheduler.histogram import merged
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample

OUT = ("frames", "blobs", "would_block", "oversize", "backlog_full")
IN = ("frames", "malformed", "other_schema", "stale", "repeated", "lost", "lost_blobs")
EVENTS = ("messages", "dropped", "unroutable", "handler_errors")


def figures(rings: Sequence[RingLoop]) -> Iterator[MetricSample]:
    """Yields all samples, sums over the rings that the process is in. Counters at zero are included, so that an alert
    on an event that never happened has a first value."""
    for what in IN:
        yield MetricSample(catalogue.RING_IN, sum(ring.inbox.counts[what] for ring in rings), (what,))
    for what in EVENTS:
        yield MetricSample(catalogue.RING, sum(ring.counts[what] for ring in rings), (what,))
    for what in OUT:
        num = sum(outbox.counts[what] for ring in rings for outbox in ring.outboxes.values())
        yield MetricSample(catalogue.RING_OUT, num, (what,))
    for lag in merged(ring.inbox.lag.snapshot() for ring in rings):
        yield MetricSample(catalogue.LAG, lag)
