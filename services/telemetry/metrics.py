"""A process's metrics as plain numbers: what is counted as it happens, and figures that other parts keep themselves and
that are read when somebody asks.

Knows no stage and no exporter: `samples` is what Prometheus and OTLP are made of.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sluice_server.engine.scheduler.histogram import Histogram, HistogramSnapshot
from sluice_server.services.telemetry.catalogue import Metric, MetricKind

MAX_VALUES = 64  # of a label: others are counted together, lest clients choose how much memory this takes
OTHER = "other"


class MetricSample(NamedTuple):
    """One value of one metric; `labels` are the values of the metric's labels, in their order."""

    metric: Metric
    value: float | HistogramSnapshot
    labels: tuple[str, ...] = ()


Figures = Callable[[], Iterable[MetricSample]]


class Metrics:
    """Metrics of one process. Counting is for its loop's thread; `samples` may be called from any."""

    def __init__(self, role: str, process_id: str) -> None:
        self.role = role
        self.process_id = process_id
        self._counts: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[Metric, tuple[str, ...]], Histogram] = {}
        self._sources: list[Figures] = []

    def collect_from(self, figures: Figures) -> None:
        """Ask `figures` each time that somebody wants to know."""
        self._sources.append(figures)

    def count(self, metric: Metric, *labels: str, num: float = 1) -> None:
        """Add to a counter."""
        assert metric.kind is MetricKind.COUNTER and len(labels) == len(metric.labels), metric.name
        key = (metric, labels)
        self._counts[key] = self._counts.get(key, 0) + num

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        self.histogram(metric, *labels).observe(value)

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram itself, for whoever observes often."""
        assert metric.kind is MetricKind.HISTOGRAM and len(labels) == len(metric.labels), metric.name
        key = (metric, labels)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram(metric.buckets)
        return found

    def samples(self) -> Iterator[MetricSample]:
        """Everything, now."""
        for (metric, labels), value in list(self._counts.items()):
            yield MetricSample(metric, value, labels)
        for (metric, labels), histogram in list(self._histograms.items()):
            yield MetricSample(metric, histogram.snapshot(), labels)
        for figures in list(self._sources):
            yield from figures()


class Labelled:
    """Values of a label that clients choose, such as their tenant: the first ones by name, others together."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._known: set[str] = set()
        self._max = max_values

    def __call__(self, value: str) -> str:
        """The value to count by."""
        if value in self._known:
            return value
        if len(self._known) >= self._max:
            return OTHER
        self._known.add(value)
        return value
