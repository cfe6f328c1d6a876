"""Records what happened to one request inside the engine, as plain numbers. The tracing service makes span events of
them.

A timeline comes with a request that is traced, and the scheduler adds to it. Bounded: events after `MAX_EVENTS` are
only
counted. Stdlib only; the clock is an argument.
"""

import enum
from typing import NamedTuple

MAX_EVENTS = 128


class EventKind(enum.StrEnum):
    """The kinds of timeline events."""

    ADMITTED = "admitted"  # first scheduled; num_tokens: found in the prefix cache
    CHUNK = "chunk"  # a part of the prompt was computed; num_tokens: its tokens
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # lost its slot and blocks; num_tokens: those computed by then
    RESUMED = "resumed"  # got a slot again; num_tokens: those that need not be computed again


class TimelineEvent(NamedTuple):
    """One event of a request."""

    kind: EventKind
    at_s: float  # engine clock
    num_tokens: int = 0
    output_index: int = 0


class RequestTimeline:
    """The events of one request in order of time."""

    __slots__ = ("num_dropped", "timeline_events")

    def __init__(self) -> None:
        self.timeline_events: list[TimelineEvent] = []
        self.num_dropped = 0

    def note(self, mark: TimelineEvent) -> None:
        """Adds an event. ADMITTED and FIRST_TOKEN are kept beyond `MAX_EVENTS`: they separate a request's phases."""
        if len(self.timeline_events) < MAX_EVENTS or mark.kind in (EventKind.ADMITTED, EventKind.FIRST_TOKEN):
            self.timeline_events.append(mark)
        else:
            self.num_dropped += 1

    def time_of(self, kind: EventKind) -> float | None:
        """Returns the time of the first event of that kind; None if there is none."""
        return next((mark.at_s for mark in self.timeline_events if mark.kind is kind), None)
