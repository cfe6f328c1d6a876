"""The encoded form of a span equals the SDK's, field by field, within the limits of its variables."""

import time

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.phases import Attribute, Phase, PhaseEvent
from sluice_server.services.telemetry.span_encoder import SpanEncoder
from sluice_server.services.telemetry.spans import EndedSpan, Parent, SpanPlacement, inside, read, under

TRACE, SPAN = "ab" * 16, "cd" * 8
HEADER, STATE = f"00-{TRACE}-{SPAN}-01", "vendor=a,other=b"
UPPER_LONG_SPACED = (f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", f" {HEADER}")
LINK = f"00-{'1' * 32}-{'2' * 16}-01"
ATTRIBUTES: dict[str, Attribute] = {"text": "ü", "yes": True, "num": -3, "share": 0.5, "many": ("a", "b"), "none": ()}
PHASE = Phase(
    "decode", 1.0, 2.5, ATTRIBUTES, (PhaseEvent("e", 2.0, {"n": 1}), PhaseEvent("f", 2.25)), "NO_ROOM", (LINK, "none")
)
RESOURCE = Resource({"service.name": "sluice", "service.instance.id": "p-0"}, "https://opentelemetry.io/schemas/1")


def encoded(*spans: EndedSpan, limits: SpanLimits | None = None) -> trace_pb2.ResourceSpans:
    (request,) = SpanEncoder(RESOURCE, limits or SpanLimits()).requests(spans)
    (found,) = ExportTraceServiceRequest.FromString(request).resource_spans
    return found


def spans_of(found: trace_pb2.ResourceSpans) -> list[trace_pb2.Span]:
    return list(found.scope_spans[0].spans)


def by_the_sdk(parent: Parent, phase: Phase, offset_ns: int) -> trace_pb2.ResourceSpans:
    """The same span through the SDK's tracer and encoder."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))

    def wall(at_s: float) -> int:
        return int(at_s * 1e9) + offset_ns

    def context(header: str, state: str = "") -> SpanContext:
        found = TraceContextTextMapPropagator().extract({"traceparent": header, "tracestate": state})
        return get_current_span(found).get_span_context()

    span: Span = provider.get_tracer("sluice", schema_url=names.SCHEMA_URL).start_span(
        phase.name,
        TraceContextTextMapPropagator().extract({"traceparent": parent.traceparent, "tracestate": parent.tracestate}),
        SpanKind.INTERNAL,
        phase.attributes,
        [Link(one) for header in phase.links if (one := context(header)).is_valid],
        wall(phase.start_s),
    )
    for event in phase.span_events:
        span.add_event(event.name, dict(event.attributes), wall(event.at_s))
    if phase.error:
        span.set_attribute(names.ERROR_TYPE, phase.error)
        span.set_status(Status(StatusCode.ERROR, phase.error))
    span.end(wall(phase.end_s))
    (found,) = encode_spans(memory.get_finished_spans()).resource_spans
    return found


@pytest.mark.parametrize("parent", [Parent(HEADER, STATE), Parent(HEADER), Parent("")], ids=["state", "plain", "root"])
def test_a_span_is_written_as_the_sdk_writes_it(parent: Parent) -> None:
    ours = encoded(EndedSpan(PHASE, parent))
    (span,) = spans_of(ours)
    theirs = by_the_sdk(parent, PHASE, span.start_time_unix_nano - 1_000_000_000)
    (expected,) = spans_of(theirs)
    assert len(span.span_id) == 8 and span.span_id != expected.span_id
    assert len(span.trace_id) == 16 and (not parent.traceparent) is (span.trace_id != expected.trace_id)
    expected.span_id, expected.trace_id = span.span_id, span.trace_id
    assert ours == theirs


def test_times_of_phases_become_those_of_the_wall() -> None:
    now = time.monotonic()
    (span,) = spans_of(encoded(EndedSpan(Phase("x", now - 1.0, now), Parent(""))))
    assert abs(span.end_time_unix_nano - time.time_ns()) < 60e9
    assert abs(span.end_time_unix_nano - span.start_time_unix_nano - 1_000_000_000) <= 1000


def test_spans_of_one_process_stand_in_each_other() -> None:
    rpc = under(Parent(HEADER, STATE))
    work = inside(rpc)
    outer, inner, later = spans_of(
        encoded(EndedSpan(PHASE, rpc, is_server=True), EndedSpan(PHASE, work), EndedSpan(PHASE, Parent(work.header())))
    )
    assert (outer.kind, inner.kind) == (trace_pb2.Span.SPAN_KIND_SERVER, trace_pb2.Span.SPAN_KIND_INTERNAL)
    assert outer.parent_span_id.hex() == SPAN and inner.parent_span_id == outer.span_id
    assert later.parent_span_id == inner.span_id and {one.trace_id.hex() for one in (outer, inner, later)} == {TRACE}
    assert outer.trace_state == inner.trace_state == STATE
    remote = trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    assert [bool(one.flags & remote) for one in (outer, inner, later)] == [True, False, True]


def test_limits_keep_the_latest_and_count_the_others() -> None:
    limits = SpanLimits(
        max_span_attributes=2, max_events=1, max_links=0, max_event_attributes=0, max_attribute_length=1
    )
    (span,) = spans_of(encoded(EndedSpan(PHASE, Parent(HEADER)), limits=limits))
    assert [(one.key, one.value.string_value) for one in span.attributes] == [("none", ""), (names.ERROR_TYPE, "N")]
    assert (span.dropped_attributes_count, span.dropped_events_count, span.dropped_links_count) == (5, 1, 1)
    assert [one.name for one in span.events] == ["f"] and not span.links
    (span,) = spans_of(encoded(EndedSpan(PHASE, Parent(HEADER)), limits=SpanLimits(max_event_attributes=0)))
    assert (span.events[0].dropped_attributes_count, len(span.events[0].attributes)) == (1, 0)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        *UPPER_LONG_SPACED,
    ],
)
def test_a_malformed_header_is_no_parent(header: str) -> None:
    place = under(Parent(header, STATE))
    assert read(header) is None and (place.parent_id, place.tracestate) == ("", "") and place.trace_id != TRACE
    assert read(place.header()) == (place.trace_id, place.span_id)


def test_a_well_formed_header_is() -> None:
    place = under(Parent(f"cc-{TRACE}-{SPAN}-00", STATE))
    assert place == SpanPlacement(TRACE, place.span_id, SPAN, STATE, is_parent_remote=True)
    assert place.header(is_sampled=False) == f"00-{TRACE}-{place.span_id}-00"


def test_what_cannot_be_an_attribute_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be None"):
        encoded(EndedSpan(Phase("x", 1.0, 2.0, {"a": None}), Parent("")))  # type: ignore[dict-item] # the point


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, "half of a pair: \ud800"])
def test_a_value_that_protobuf_cannot_hold_is_refused(value: Attribute) -> None:
    with pytest.raises(ValueError, match=r"cannot be|can't encode"):
        encoded(EndedSpan(Phase("x", 1.0, 2.0, {"a": value}), Parent("")))


@pytest.mark.parametrize(
    "value", [(1 << 63) - 1, -(1 << 63), 0, -1, 300, 0.0, -1e300, False, "", "ü" * 200, "x" * 17000, ("",)]
)
def test_every_value_is_written_as_the_sdk_writes_it(value: Attribute) -> None:
    phase = Phase(
        "x", 1.0, 2.5, {"a": value}, (PhaseEvent("e", 2.0, {} if isinstance(value, tuple) else {"b": value}),)
    )
    (ours,) = spans_of(encoded(EndedSpan(phase, Parent(HEADER))))
    (theirs,) = spans_of(by_the_sdk(Parent(HEADER), phase, ours.start_time_unix_nano - 1_000_000_000))
    assert (ours.attributes, ours.events) == (theirs.attributes, theirs.events)


def test_values_that_are_equal_keep_their_kind_and_others_their_value() -> None:
    """Repeated attributes are encoded as the first time."""
    values: list[Attribute] = [1, True, 1.0, "1", 1, ("1",), True]
    told = [
        EndedSpan(Phase("x", 1.0, 2.0, {"key": one, names.GEN_AI_REQUEST_SEED: str(one)}), Parent("")) for one in values
    ]
    spans = spans_of(encoded(*told))
    kinds = [{pair.key: pair.value.WhichOneof("value") for pair in span.attributes}["key"] for span in spans]
    assert kinds == [
        "int_value",
        "bool_value",
        "double_value",
        "string_value",
        "int_value",
        "array_value",
        "bool_value",
    ]
    seeds = [pair.value.string_value for span in spans for pair in span.attributes if pair.key != "key"]
    assert seeds == [str(one) for one in values]
