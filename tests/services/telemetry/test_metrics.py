"""Samples: counted, observed, shown to Prometheus and sent over OTLP alike; and the catalogue of their names."""

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Generate, TextPrompt
from sluice_server.services.telemetry import catalogue, prometheus
from sluice_server.services.telemetry.catalogue import MetricKind
from sluice_server.services.telemetry.collector import Collector
from sluice_server.services.telemetry.metrics import OTHER, Labelled, Metrics, MetricSample
from sluice_server.services.telemetry.observed import RequestUsage, StartedRequest
from sluice_server.services.telemetry.observer import GatewayObserver
from sluice_server.services.telemetry.push import pushing
from sluice_server.services.telemetry.tracing import Tracer


def filled() -> Metrics:
    """A registry with one metric of each kind."""
    metrics = Metrics("gateway", "gateway-0")
    metrics.count(catalogue.REFUSALS, "QUEUE_FULL")
    metrics.count(catalogue.REFUSALS, "QUEUE_FULL", num=2)
    metrics.count(catalogue.REFUSALS, "DRAINING")
    for value in (0.004, 0.02, 0.021, 500.0):
        metrics.observe(catalogue.TTFT, value)
    metrics.collect_from(lambda: [MetricSample(catalogue.OPEN, 7)])
    return metrics


def test_a_histogram_counts_by_inclusive_upper_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    found = histogram.snapshot()
    assert (found.counts, found.total, found.num) == ((2, 2, 1), 7.5, 5)


def test_prometheus_shows_every_sample_with_its_process() -> None:
    text = generate_latest(prometheus.registry_of(filled())).decode()
    values: dict[tuple[object, ...], float] = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    own = (("process", "gateway-0"), ("role", "gateway"))
    assert values["sluice_refusals_total", ("process", "gateway-0"), ("reason", "QUEUE_FULL"), ("role", "gateway")] == 3
    assert values["sluice_requests_open", *own] == 7
    name = "gen_ai_server_time_to_first_token_seconds"
    assert values[f"{name}_count", *own] == 4 and values[f"{name}_sum", *own] == pytest.approx(500.045)
    buckets = {bound: values[f"{name}_bucket", ("le", bound), *own] for bound in ("0.005", "0.02", "120.0", "+Inf")}
    assert (buckets["0.005"], buckets["0.02"], buckets["120.0"], buckets["+Inf"]) == (1, 2, 3, 4)
    assert any(key[0] == "process_resident_memory_bytes" for key in values)


async def test_otlp_brings_the_same_to_a_real_receiver() -> None:
    collector = Collector()
    try:
        async with pushing(filled(), {"service.instance.id": "gateway-0"}, collector.endpoint):
            await asyncio.sleep(0)  # what is left is sent at the end
        refusals = {point.attributes["reason"]: point.value for point in collector.points("sluice.refusals")}
        assert refusals == {"QUEUE_FULL": 3, "DRAINING": 1}
        (ttft,) = collector.points("gen_ai.server.time_to_first_token")
        assert (ttft.value, ttft.process) == (4, "gateway-0")
        assert [point.value for point in collector.points("sluice.requests.open")] == [7]
    finally:
        collector.stop()


async def test_without_an_endpoint_nothing_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    before = len(asyncio.all_tasks())
    async with pushing(filled(), {}, ""):
        assert len(asyncio.all_tasks()) == before


def test_a_label_that_clients_choose_is_bounded() -> None:
    labelled = Labelled(2)
    assert [labelled(name) for name in ("a", "b", "a", "c", "d", "b")] == ["a", "b", "a", OTHER, OTHER, "b"]


def test_a_port_that_is_taken_is_refused_by_its_setting(unused_tcp_port: int) -> None:
    prometheus.serve(filled(), "127.0.0.1", unused_tcp_port)
    with pytest.raises(ServiceError, match="--metrics-port"):
        prometheus.serve(filled(), "127.0.0.1", unused_tcp_port)
    text = urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics", timeout=10).read()
    assert b"sluice_refusals_total" in text


def test_names_are_in_the_catalogue_and_nowhere_else() -> None:
    assert len({metric.name for metric in catalogue.ALL}) == len({one.prometheus for one in catalogue.ALL}) > 35
    for metric in catalogue.ALL:
        assert re.fullmatch(r"(sluice|gen_ai\.server|http\.server)\.[a-z_.]+", metric.name)
        assert metric.prometheus.endswith("_total") is (metric.kind is MetricKind.COUNTER)
        assert metric.help and not metric.help.endswith(".")
    services = Path(catalogue.__file__).parents[1]
    spelt = re.compile(r'"(?:sluice_[a-z_]+_(?:total|seconds)|(?:gen_ai|http)_server_\w+)"')
    for path in services.rglob("*.py"):
        assert not spelt.search(path.read_text()), path


def test_a_gateway_shows_every_kind_of_tokens_from_its_start_and_counts_each() -> None:
    metrics = Metrics("gateway", "gateway-0")
    observer = GatewayObserver(Tracer(None), metrics, lambda envelope: None)

    def shown() -> dict[str, object]:
        return {one.labels[0]: one.value for one in metrics.samples() if one.metric is catalogue.TOKENS}

    assert len(shown()) == 7 and set(shown().values()) == {0}
    started = StartedRequest(Envelope("r", "gateway-0"), "Generate", Generate(TextPrompt("x"), SamplingParams()))
    used = RequestUsage(num_prompt=1, num_cached=2, num_image=3, num_completion=4, num_reasoning=5, num_drafted=6)
    observer.request_started(started).ended(0, "", used)
    told = {"prompt": 1, "cached": 2, "image": 3, "completion": 4, "reasoning": 5, "drafted": 6, "accepted": 0}
    assert shown() == told
