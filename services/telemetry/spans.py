"""Where a span stands in its trace: read from a W3C header, or inside another span; and what waits to be sent of it.

Knows no telemetry library. Ids are drawn here, at random.
"""

import random
import re
from typing import NamedTuple

from sluice_server.services.telemetry.phases import Phase

SAMPLED, NOT_SAMPLED = "01", "00"

# https://www.w3.org/TR/trace-context-2/#traceparent-header, in the form that is let in at the door.
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")


class Parent(NamedTuple):
    """The remote span that phases hang under, as W3C headers."""

    traceparent: str
    tracestate: str = ""


class SpanPlacement(NamedTuple):
    """Where a span stands. Ids are lower-case hex; a root has no `parent_id`."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    tracestate: str = ""
    is_parent_remote: bool = False

    def header(self, *, is_sampled: bool = True) -> str:
        """The W3C header that names it."""
        return f"00-{self.trace_id}-{self.span_id}-{SAMPLED if is_sampled else NOT_SAMPLED}"


class Ended(NamedTuple):
    """A span that is over: what it tells, and where it stands or under which parent it gets a place when it is sent."""

    phase: Phase
    where: SpanPlacement | Parent
    is_server: bool = False

    def place(self) -> SpanPlacement:
        """Where it stands; drawn anew at each call for what has only a parent."""
        return self.where if isinstance(self.where, SpanPlacement) else under(self.where)


def under(parent: Parent) -> SpanPlacement:
    """A span under a remote parent; an empty or malformed header is none, and begins a new trace."""
    found = read(parent.traceparent)
    if found is None:
        return SpanPlacement(f"{random.getrandbits(128) or 1:032x}", _span_id())
    return SpanPlacement(found[0], _span_id(), found[1], parent.tracestate, is_parent_remote=True)


def inside(place: SpanPlacement) -> SpanPlacement:
    """A span in a span of the same process."""
    return SpanPlacement(place.trace_id, _span_id(), place.span_id, place.tracestate)


def read(traceparent: str) -> tuple[str, str] | None:
    """Trace and span id of a W3C header; None when it is malformed."""
    found = _HEADER.fullmatch(traceparent)
    return None if found is None else (found[1], found[2])


def is_sampled(traceparent: str) -> bool:
    """Whether the flags of a W3C header say so; a trace that has not begun may be."""
    return not traceparent or traceparent[-1] in "13579bdf"


def _span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"
