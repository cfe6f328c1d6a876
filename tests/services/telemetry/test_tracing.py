"""Spans of one process at a real OTLP receiver: what is held back, what is kept, what a dead collector costs."""

from collections.abc import Iterator, Sequence
from threading import Event

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from engine.request import SamplingParams
from services.gateway.observer import Started, Used
from services.messages import Envelope
from services.telemetry import names
from services.telemetry.collector import Collector
from services.telemetry.held import Held, Parent
from services.telemetry.metrics import Metrics
from services.telemetry.observer import GatewayObserver
from services.telemetry.phases import Happening, Phase
from services.telemetry.queue import MAX_BATCH, SpanQueue
from services.telemetry.tracing import QUEUE_SIZE, Sampling, Tracer
from services.work import Generate, TextPrompt

TRACE, SPAN = "ab" * 16, "cd" * 8
YES, NO = Parent(f"00-{TRACE}-{SPAN}-01", ""), Parent(f"00-{TRACE}-{SPAN}-00", "")
PHASE = Phase("queue", 1.0, 2.5, {"n": 3}, (Happening("sluice.chunk", 2.0, {"sluice.tokens": 5}),), "NO_ROOM")


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.stop()


def tracer_to(collector: Collector, sampling: Sampling = Sampling()) -> Tracer:  # noqa: B008 # frozen
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
    held = Held(max_requests=2)
    for name in "abc":
        for _ in range(100):
            held.add(name, NO, PHASE)
    assert [len(held.take(name)) for name in "abc"] == [0, 64, 64] and held.num_dropped == 1


def test_a_share_is_chosen_by_the_trace_id() -> None:
    ids = [f"{i * 2654435761 % (1 << 128):032x}" for i in range(1 << 56, (1 << 56) + (1 << 52) * 400, 1 << 52)]
    chosen = [one for one in ids if Sampling(0.25).takes(one)]
    assert 0.1 < len(chosen) / len(ids) < 0.4
    assert all(Sampling(0.5).takes(one) for one in chosen), "a larger share takes no other requests"
    assert not any(Sampling(0.0).takes(one) for one in ids) and all(Sampling(1.0).takes(one) for one in ids)


@pytest.mark.parametrize(
    ("flags", "sampling", "code", "is_kept", "is_told"),
    [
        ("01", Sampling(0.0, 99.0), 0, True, False),  # the caller wants it
        ("00", Sampling(1.0, 99.0), 0, False, False),  # the caller does not
        ("", Sampling(1.0, 99.0), 0, True, False),  # nobody says, all are taken
        ("", Sampling(0.0, 99.0), 0, False, False),
        ("", Sampling(0.0, 99.0), 1, False, False),  # clients cancel all the time
        ("", Sampling(0.0, 99.0), 13, True, True),  # failed
        ("00", Sampling(0.0, 99.0), 8, True, True),
        ("", Sampling(0.0, 0.0), 0, True, True),  # slow
    ],
)
def test_slow_and_failed_requests_are_kept_in_any_case(
    collector: Collector, flags: str, sampling: Sampling, code: int, is_kept: bool, is_told: bool
) -> None:
    told: list[Envelope] = []
    tracer = tracer_to(collector, sampling)
    caller = f"00-{TRACE}-{SPAN}-{flags}" if flags else ""
    envelope = Envelope("r", "g", model="m", traceparent=caller)
    trace = GatewayObserver(tracer, Metrics("gateway", "g"), told.append).request_started(
        Started(envelope, "Generate", Generate(TextPrompt("x"), SamplingParams()))
    )
    assert trace.traceparent.endswith("-01" if is_kept and not is_told else "-00")
    trace.happened("replayed", attempt=2)
    trace.ended(code, "", Used(num_completion=3))
    tracer.shutdown()
    assert told == ([envelope] if is_told else [])
    assert tracer.counts["exported"] == (2 if is_kept else 0)
    if is_kept:
        (work,) = collector.spans_named("text_completion m", 10)
        assert [(one.name, one.attributes) for one in work.events] == [(names.EVENT_REPLAYED, {names.ATTEMPT: "2"})]
        assert work.is_error is (code != 0)


class Stuck(SpanExporter):
    """A collector that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.is_free = Event()
        self.num = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_free.wait(60)
        self.num += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing."""


def test_a_stuck_collector_costs_spans_and_nothing_else() -> None:
    exporter, counts = Stuck(), {"queued": 0, "dropped": 0, "exported": 0, "failed": 0}
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanQueue(exporter, counts, size=16))
    tracer = provider.get_tracer("t")
    for _ in range(500):
        tracer.start_span("s").end()  # returns at once, or the test times out
    assert (counts["queued"], counts["dropped"]) == (16, 484)
    exporter.is_free.set()
    provider.shutdown()
    assert exporter.num == counts["exported"] == counts["queued"]


class Fickle(SpanExporter):
    """A collector that fails when it is told to; notes what it is sent."""

    def __init__(self) -> None:
        self.fails = True
        self.sent: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sent.append(len(spans))
        return SpanExportResult.FAILURE if self.fails else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing."""


def test_a_collector_that_fails_is_tried_with_single_spans_and_batches_grow_when_it_is_back() -> None:
    """A step that runs while spans are encoded waits for the interpreter: a dead collector must not cost that."""
    exporter, counts = Fickle(), {"queued": 0, "dropped": 0, "exported": 0, "failed": 0}
    queue = SpanQueue(exporter, counts, size=4096)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("t")

    def send(num: int) -> list[int]:
        exporter.sent.clear()
        for _ in range(num):
            tracer.start_span("s").end()
        queue.force_flush()
        return exporter.sent

    assert set(send(500)) == {1} and counts["failed"] == 500
    exporter.fails = False
    assert send(500)[:5] == [1, 2, 4, 8, 16] and max(exporter.sent) <= MAX_BATCH and counts["exported"] == 500
    exporter.fails = True
    send(2 * MAX_BATCH)
    assert sorted(exporter.sent)[:-1] == [1] * (len(exporter.sent) - 1), "only the first failure is a whole batch's"
    provider.shutdown()
    assert counts == {"queued": 1064, "dropped": 0, "exported": 500, "failed": 564}


def test_what_would_be_dropped_is_not_even_made() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = Stuck()
    tracer = Tracer(provider)
    provider.add_span_processor(SpanQueue(exporter, tracer.counts, QUEUE_SIZE))
    tracer.counts["queued"] = QUEUE_SIZE
    tracer.record("r", YES, PHASE)
    assert (tracer.counts["queued"], tracer.counts["dropped"]) == (QUEUE_SIZE, 1)
    tracer.counts["queued"] = QUEUE_SIZE - 1
    tracer.record("r", YES, PHASE)
    assert (tracer.counts["queued"], tracer.counts["dropped"]) == (QUEUE_SIZE, 1)
    exporter.is_free.set()
    provider.shutdown()


def test_the_end_does_not_wait_for_a_dead_collector(caplog: pytest.LogCaptureFixture) -> None:
    exporter, counts = Stuck(), {"queued": 0, "dropped": 0, "exported": 0, "failed": 0}
    queue = SpanQueue(exporter, counts, size=512)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("t")
    queue._exporter.close_after(-1.0)  # its time is over
    for _ in range(40):
        tracer.start_span("s").end()
    queue.force_flush()
    assert (counts["failed"], exporter.num) == (40, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"
    exporter.is_free.set()
    provider.shutdown()
