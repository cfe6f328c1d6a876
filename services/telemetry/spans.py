"""The place of a span in its trace, from a W3C header or inside another span; and ended spans that wait to be sent.

Uses no telemetry library. Ids are random and drawn here.
"""

import random
import re

import msgspec

from sluice_server.services.telemetry.phases import Phase

SAMPLED, NOT_SAMPLED = "01", "00"

# https://www.w3.org/TR/trace-context-2/#traceparent-header, in the form that the gateway's validation accepts.
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")


class Parent(msgspec.Struct, frozen=True, gc=False):
    """The remote parent span of phases, as W3C headers."""

    traceparent: str
    tracestate: str = ""


class SpanPlacement(msgspec.Struct, frozen=True, gc=False):
    """The place of a span in a trace. Ids are lower-case hex; a root has no `parent_id`."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    tracestate: str = ""
    is_parent_remote: bool = False

    def header(self, *, is_sampled: bool = True) -> str:
        """Returns the W3C traceparent header of the span."""
        return f"00-{self.trace_id}-{self.span_id}-{SAMPLED if is_sampled else NOT_SAMPLED}"


class EndedSpan(msgspec.Struct, frozen=True, gc=False):
    """A span that has ended: its phase, and its place or the parent under which it gets one when it is sent."""

    phase: Phase
    where: SpanPlacement | Parent
    is_server: bool = False


def under(parent: Parent) -> SpanPlacement:
    """Returns a place under a remote parent. An empty or malformed header starts a new trace."""
    found = read(parent.traceparent)
    if found is None:
        return SpanPlacement(random.randbytes(16).hex(), span_id().hex())
    return SpanPlacement(found[0], span_id().hex(), found[1], parent.tracestate, is_parent_remote=True)


def inside(place: SpanPlacement) -> SpanPlacement:
    """Returns a place under a span of the same process."""
    return SpanPlacement(place.trace_id, span_id().hex(), place.span_id, place.tracestate)


def read(traceparent: str) -> tuple[str, str] | None:
    """Returns trace and span id of a W3C header; None if it is malformed."""
    found = _HEADER.fullmatch(traceparent) if traceparent else None
    return None if found is None else (found[1], found[2])


def is_sampled(traceparent: str) -> bool:
    """Whether the sampled flag of a W3C header is set; True for "", a trace that has not begun."""
    return not traceparent or traceparent[-1] in "13579bdf"


def span_id() -> bytes:
    """Returns a new id: 8 bytes, of which not all are 0."""
    return (random.getrandbits(64) or 1).to_bytes(8)
