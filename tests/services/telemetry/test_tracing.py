"""Spans of one process at a real OTLP receiver: their content, sampling, and spans that are kept on failure."""

from collections.abc import Iterator

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Generate, TextPrompt
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.collector import Collector
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.observed import RequestUsage, StartedRequest
from sluice_server.services.telemetry.observer import GatewayObserver
from sluice_server.services.telemetry.phases import Phase, PhaseEvent
from sluice_server.services.telemetry.spans import Parent
from sluice_server.services.telemetry.tracing import HeldSpans, Tracer, TraceSampling

TRACE, SPAN = "ab" * 16, "cd" * 8
YES, NO = Parent(f"00-{TRACE}-{SPAN}-01", ""), Parent(f"00-{TRACE}-{SPAN}-00", "")
PHASE = Phase("queue", 1.0, 2.5, {"n": 3}, (PhaseEvent("sluice.chunk", 2.0, {"sluice.tokens": 5}),), "NO_ROOM")


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.stop()


def tracer_to(collector: Collector, sampling: TraceSampling = TraceSampling()) -> Tracer:  # noqa: B008 # frozen
    return Tracer.create({"service.name": "sluice", "service.instance.id": "p-0"}, collector.endpoint, sampling)


def test_a_phase_becomes_a_span_with_its_events_links_and_error(collector: Collector) -> None:
    tracer = tracer_to(collector)
    tracer.record("r", YES, PHASE)
    tracer.record("r", YES, Phase("step", 1.0, 2.0, links=(NO.traceparent, "none")))
    tracer.shutdown()
    queue, step = collector.wait_for(TRACE, {"queue", "step"}, 10)
    assert (queue.parent_id, queue.process, queue.attributes["n"], queue.is_error) == (SPAN, "p-0", "3", True)
    assert queue.attributes[names.ERROR_TYPE] == "NO_ROOM" and queue.took_ns == 1_500_000_000
    assert [(one.name, one.at_ns - queue.start_ns) for one in queue.events] == [("sluice.chunk", 1_000_000_000)]
    assert step.links == ((TRACE, SPAN),)
    assert tracer.counts == {"queued": 2, "dropped": 0, "exported": 2, "failed": 0}


def test_what_is_not_sampled_waits_until_it_is_wanted(collector: Collector) -> None:
    tracer = tracer_to(collector)
    tracer.record("fast", NO, PHASE)
    tracer.record("slow", NO, PHASE)
    assert tracer.counts["queued"] == 0
    tracer.keep("slow")
    tracer.keep("slow")
    tracer.keep("unknown")
    tracer.shutdown()
    assert len(collector.wait_for(TRACE, {"queue"}, 10)) == 1 and len(tracer.held) == 1


def test_what_is_held_is_bounded() -> None:
    held = HeldSpans(max_requests=2)
    for name in "abc":
        for _ in range(100):
            held.add(name, NO, PHASE)
    assert [len(held.take(name)) for name in "abc"] == [0, 64, 64] and held.num_dropped == 1


def test_a_share_is_chosen_by_the_trace_id() -> None:
    ids = [f"{i * 2654435761 % (1 << 128):032x}" for i in range(1 << 56, (1 << 56) + (1 << 52) * 400, 1 << 52)]
    chosen = [one for one in ids if TraceSampling(0.25).takes(one)]
    assert 0.1 < len(chosen) / len(ids) < 0.4
    assert all(TraceSampling(0.5).takes(one) for one in chosen), "a larger share takes no other requests"
    assert not any(TraceSampling(0.0).takes(one) for one in ids) and all(TraceSampling(1.0).takes(one) for one in ids)


@pytest.mark.parametrize(
    ("flags", "sampling", "code", "is_kept", "is_told"),
    [
        ("01", TraceSampling(0.0, 99.0), 0, True, False),  # the caller wants it
        ("00", TraceSampling(1.0, 99.0), 0, False, False),  # the caller does not
        ("", TraceSampling(1.0, 99.0), 0, True, False),  # the caller does not say, all are taken
        ("", TraceSampling(0.0, 99.0), 0, False, False),
        ("", TraceSampling(0.0, 99.0), 1, False, False),  # clients cancel all the time
        ("", TraceSampling(0.0, 99.0), 13, True, True),  # failed
        ("00", TraceSampling(0.0, 99.0), 8, True, True),
        ("", TraceSampling(0.0, 0.0), 0, True, True),  # slow
    ],
)
def test_slow_and_failed_requests_are_kept_in_any_case(
    collector: Collector, flags: str, sampling: TraceSampling, code: int, is_kept: bool, is_told: bool
) -> None:
    told: list[Envelope] = []
    tracer = tracer_to(collector, sampling)
    caller = f"00-{TRACE}-{SPAN}-{flags}" if flags else ""
    envelope = Envelope("r", "g", model="m", traceparent=caller)
    trace = GatewayObserver(tracer, Metrics("gateway", "g"), told.append).request_started(
        StartedRequest(envelope, "Generate", Generate(TextPrompt("x"), SamplingParams()))
    )
    assert trace.traceparent.endswith("-01" if is_kept and not is_told else "-00")
    trace.happened("replayed", attempt=2)
    trace.ended(code, "", RequestUsage(num_completion=3))
    tracer.shutdown()
    assert told == ([envelope] if is_told else [])
    assert tracer.counts["exported"] == (2 if is_kept else 0)
    if is_kept:
        (work,) = collector.spans_named("text_completion m", 10)
        assert [(one.name, one.attributes) for one in work.events] == [(names.EVENT_REPLAYED, {names.ATTEMPT: "2"})]
        assert work.is_error is (code != 0)


def test_flags_of_the_caller_are_read_as_bits(collector: Collector) -> None:
    """W3C level 2 has a second flag: the trace id is random."""
    tracer = tracer_to(collector, TraceSampling(0.0, 99.0))
    observer = GatewayObserver(tracer, Metrics("gateway", "g"), lambda envelope: None)
    for flags, header in (("03", "-01"), ("02", "-00")):
        envelope = Envelope("r", "g", model="m", traceparent=f"00-{TRACE}-{SPAN}-{flags}")
        trace = observer.request_started(
            StartedRequest(envelope, "Generate", Generate(TextPrompt("x"), SamplingParams()))
        )
        assert trace.traceparent.endswith(header)
    tracer.record("r", Parent(f"00-{TRACE}-{SPAN}-03"), PHASE)
    tracer.record("r", Parent(f"00-{TRACE}-{SPAN}-02"), PHASE)
    tracer.shutdown()
    assert tracer.counts["exported"] == 1 and len(tracer.held) == 1


def test_opentelemetry_s_variables_are_honoured(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=from-outside")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    tracer = Tracer.create({"service.name": "sluice"}, "")
    tracer.record("r", YES, Phase("queue", 1.0, 2.0, {"text": "abcdefgh"}))
    tracer.shutdown()
    (span,) = collector.wait_for(TRACE, {"queue"}, 10)
    assert (span.process, span.attributes) == ("from-outside", {"text": "abcd"})
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not Tracer.create({}, "").is_on


@pytest.mark.parametrize("delay", ["0", "-1", "soon", "1.5"])
def test_a_delay_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, delay: str) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", delay)
    with pytest.raises(ServiceError, match="OTEL_BSP_SCHEDULE_DELAY"):
        Tracer.create({}, "http://127.0.0.1:1")
