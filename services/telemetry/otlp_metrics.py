"""Sends a process's samples to an OTLP/gRPC collector, every `INTERVAL_S` seconds.

Samples are read on the loop. They are sent in a separate thread, one batch at a time, so that a dead collector blocks
nothing. Imported only if an endpoint is set.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sluice_server.engine.scheduler.histogram import HistogramSnapshot
from sluice_server.services.telemetry import catalogue, names
from sluice_server.services.telemetry.catalogue import MetricKind
from sluice_server.services.telemetry.metrics import Metrics, MetricSample
from sluice_server.services.telemetry.otlp_channel import CHANNEL_OPTIONS

INTERVAL_S = 10.0  # a push costs a process 7 ms of processor time
TIMEOUT_S = 2.0

Point = NumberDataPoint | HistogramDataPoint


class MetricPush:
    """Pushes until it is stopped, and once more at the stop."""

    def __init__(self, metrics: Metrics, resource: Mapping[str, str], endpoint: str) -> None:
        self._metrics = metrics
        self._resource = Resource.create(resource)
        is_plain = not endpoint.startswith("https")
        self._exporter = OTLPMetricExporter(
            endpoint=endpoint, insecure=is_plain, timeout=TIMEOUT_S, channel_options=CHANNEL_OPTIONS
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="otlp-metrics")
        self._start_ns = time.time_ns()

    async def run(self) -> None:
        """Push every `INTERVAL_S` until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._push()

    async def stop(self) -> None:
        """Push once more, for at most `TIMEOUT_S`, and shut down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._push()
        self._exporter.shutdown()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _push(self) -> None:
        data = data_of(self._metrics.samples(), self._resource, self._start_ns)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._exporter.export, data)


def data_of(samples: Iterable[MetricSample], resource: Resource, start_ns: int) -> MetricsData:
    """Returns the samples as OpenTelemetry metrics data; counts start at `start_ns`."""
    now_ns = time.time_ns()
    points: dict[catalogue.Metric, list[Point]] = {}
    for sample in samples:
        points.setdefault(sample.metric, []).append(_point(sample, start_ns, now_ns))
    scope = ScopeMetrics(InstrumentationScope("sluice"), [_metric(*one) for one in points.items()], names.SCHEMA_URL)
    return MetricsData([ResourceMetrics(resource, [scope], names.SCHEMA_URL)])


def _metric(metric: catalogue.Metric, points: list[Point]) -> Metric:
    numbers = [point for point in points if isinstance(point, NumberDataPoint)]
    data: Sum | Gauge | Histogram
    match metric.kind:
        case MetricKind.COUNTER:
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        case MetricKind.GAUGE:
            data = Gauge(numbers)
        case MetricKind.HISTOGRAM:
            histograms = [point for point in points if isinstance(point, HistogramDataPoint)]
            data = Histogram(histograms, AggregationTemporality.CUMULATIVE)
    return Metric(metric.name, metric.help, metric.unit or "1", data)


def _point(sample: MetricSample, start_ns: int, now_ns: int) -> Point:
    attributes = dict(zip(sample.metric.labels, sample.labels, strict=True))
    value = sample.value
    if not isinstance(value, HistogramSnapshot):
        return NumberDataPoint(attributes, start_ns, now_ns, float(value))
    edge = 0.0  # minimum and maximum are not recorded
    return HistogramDataPoint(
        attributes, start_ns, now_ns, value.num, value.total, value.counts, value.bounds, edge, edge
    )
