"""The Prometheus endpoint of a process: its samples in the exposition format, and CPU and memory of the process."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.scheduler.histogram import HistogramSnapshot
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.catalogue import MetricKind
from sluice_server.services.telemetry.metrics import Metrics

OWN = ("role", "process")


class Samples(Collector):
    """Converts samples to metric families."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Returns one family for each metric that has samples."""
        families: dict[catalogue.Metric, Metric] = {}
        own = [self._metrics.role, self._metrics.process_id]
        for metric, value, labels in self._metrics.samples():
            family = families.get(metric)
            if family is None:
                family = families[metric] = _family(metric)
            _add(family, [*own, *labels], value)
        return families.values()


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """Returns a registry of this process's metrics only."""
    registry = CollectorRegistry()
    registry.register(Samples(metrics))
    ProcessCollector(registry=registry)
    return registry


def serve(metrics: Metrics, host: str, port: int) -> None:
    """Start the HTTP server for scrapes. Raises ServiceError LISTEN_FAILED if the port is taken."""
    try:
        start_http_server(port, host, registry_of(metrics))
    except OSError as error:
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "LISTEN_FAILED",
            f"--metrics-port: cannot listen on {host}:{port} ({error.strerror}); choose another first port",
            field="metrics_port",
        ) from error


def _family(metric: catalogue.Metric) -> Metric:
    labels = [*OWN, *metric.labels]
    match metric.kind:
        case MetricKind.COUNTER:
            return CounterMetricFamily(metric.prometheus, metric.help, labels=labels)
        case MetricKind.GAUGE:
            return GaugeMetricFamily(metric.prometheus, metric.help, labels=labels)
        case MetricKind.HISTOGRAM:
            return HistogramMetricFamily(metric.prometheus, metric.help, labels=labels)


def _add(family: Metric, labels: list[str], value: float | HistogramSnapshot) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, HistogramSnapshot)
        buckets, so_far = [], 0
        for bound, num in zip([*map(str, value.bounds), "+Inf"], value.counts, strict=True):
            so_far += num
            buckets.append((bound, so_far))
        family.add_metric(labels, buckets, value.total)
    else:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily) and not isinstance(value, HistogramSnapshot)
        family.add_metric(labels, value)
