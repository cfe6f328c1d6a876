"""A process's Prometheus metrics, in a registry of its own, and the endpoint that shows them.

Two kinds: what the gateway observes as it happens (requests, tokens, latencies), and figures that other parts keep as
plain numbers and that are read when somebody scrapes. Knows no stage.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.errors import Code, ServiceError
from services.telemetry import names

# The convention's buckets, with room above for slow machines.
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 120.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

Figures = Callable[[], Mapping[str, float]]


class Metrics:
    """Metrics of one process; every sample carries its role and process id."""

    def __init__(self, role: str, process_id: str) -> None:
        self._labels = {"role": role, "process": process_id}
        self.registry = CollectorRegistry()
        self._figures = _PlainFigures(self._labels)
        self.registry.register(self._figures)
        own = tuple(self._labels)
        self._requests = Counter(
            names.METRIC_REQUESTS, "Ended requests", (*own, "code", "reason"), registry=self.registry
        )
        self._tokens = Counter(names.METRIC_TOKENS, "Tokens of ended requests", (*own, "kind"), registry=self.registry)
        self._events = Counter(
            names.METRIC_EVENTS,
            "Refusals, dropped messages, slow readers",
            (*own, "event", "reason"),
            registry=self.registry,
        )
        self._histograms = {
            name: Histogram(name, text, own, buckets=buckets, registry=self.registry)
            for name, text, buckets in (
                (names.METRIC_DURATION, "Request duration", DURATION_BUCKETS),
                (names.METRIC_TTFT, "Time to first token", TTFT_BUCKETS),
                (names.METRIC_TPOT, "Time per output token after the first", TPOT_BUCKETS),
            )
        }

    def collect_from(self, figures: Figures) -> None:
        """Ask `figures` at each scrape; names ending in _total are counters, the others gauges."""
        self._figures.sources.append(figures)

    def request_ended(self, code: str, reason: str) -> None:
        """One request more has ended."""
        self._requests.labels(**self._labels, code=code, reason=reason).inc()

    def tokens(self, kind: str, num: int) -> None:
        """Tokens used: prompt, cached or completion."""
        self._tokens.labels(**self._labels, kind=kind).inc(num)

    def event(self, event: str, reason: str) -> None:
        """Something without a request of its own."""
        self._events.labels(**self._labels, event=event, reason=reason).inc()

    def observe(self, name: str, seconds: float) -> None:
        """A latency; `name` is one of the METRIC_… histograms."""
        self._histograms[name].labels(**self._labels).observe(seconds)

    def serve(self, port: int) -> None:
        """Answer scrapes on 127.0.0.1. Raises ServiceError when the port cannot be had."""
        try:
            start_http_server(port, "127.0.0.1", self.registry)
        except OSError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "LISTEN_FAILED",
                f"--metrics-port: cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another first port",
                field="metrics_port",
            ) from error


class _PlainFigures(Collector):
    """Turns plain numbers into samples."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.sources: list[Figures] = []
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Samples of all sources."""
        keys, values = list(self._labels), list(self._labels.values())
        for figures in self.sources:
            for name, value in figures().items():
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                metric = family(name, name.removeprefix("sluice_").replace("_", " "), labels=keys)
                metric.add_metric(values, value)
                yield metric
