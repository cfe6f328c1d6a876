"""Metrics of a process as plain numbers: counters and histograms kept here, and figures that other modules provide.

Figures are read when samples are. `samples` is the input of the Prometheus and OTLP exporters.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sluice_server.engine.scheduler.histogram import Histogram, HistogramSnapshot
from sluice_server.services.telemetry.catalogue import Metric, MetricKind

MAX_VALUES = 64  # distinct values of a label; further ones are counted together, so that clients cannot fill the memory
OTHER = "other"


class MetricSample(NamedTuple):
    """One value of one metric; `labels` are the values of the metric's labels, in order."""

    metric: Metric
    value: float | HistogramSnapshot
    labels: tuple[str, ...] = ()


Figures = Callable[[], Iterable[MetricSample]]


class Metrics:
    """The metrics of one process. Counting is for the loop's thread only; `samples` may be called from any thread."""

    def __init__(self, role: str, process_id: str) -> None:
        self.role = role
        self.process_id = process_id
        self._counts: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[Metric, tuple[str, ...]], Histogram] = {}
        self._sources: list[Figures] = []

    def collect_from(self, figures: Figures) -> None:
        """Add a source of samples, which is called each time samples are read."""
        self._sources.append(figures)

    def count(self, metric: Metric, *labels: str, num: float = 1) -> None:
        """Add to a counter."""
        assert metric.kind is MetricKind.COUNTER and len(labels) == len(metric.labels), metric.name
        key = (metric, labels)
        self._counts[key] = self._counts.get(key, 0) + num

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self.histogram(metric, *labels).observe(value)

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Returns the histogram itself, for callers that observe often."""
        assert metric.kind is MetricKind.HISTOGRAM and len(labels) == len(metric.labels), metric.name
        key = (metric, labels)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram(metric.buckets)
        return found

    def samples(self) -> Iterator[MetricSample]:
        """Yields the present value of every metric."""
        for (metric, labels), value in list(self._counts.items()):
            yield MetricSample(metric, value, labels)
        for (metric, labels), histogram in list(self._histograms.items()):
            yield MetricSample(metric, histogram.snapshot(), labels)
        for figures in list(self._sources):
            yield from figures()


class Labelled:
    """Bounds the values of a label that clients choose, such as the tenant: the first `max_values` are kept, others
    become OTHER."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._known: set[str] = set()
        self._max = max_values

    def __call__(self, value: str) -> str:
        """Returns the value to count by."""
        if value in self._known:
            return value
        if len(self._known) >= self._max:
            return OTHER
        self._known.add(value)
        return value
