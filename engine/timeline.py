"""What happened to one request inside the engine, as plain numbers: who traces it makes events of them.

A trail is handed in with a request that somebody traces, and noted into by the scheduler. Bounded: what comes after
`MAX_MARKS` is counted only. Knows no span; the clock is an argument.
"""

import enum
from typing import NamedTuple

MAX_MARKS = 128


class EventKind(enum.StrEnum):
    """What was noted."""

    ADMITTED = "admitted"  # first scheduled; tokens found in the prefix cache
    CHUNK = "chunk"  # a piece of prompt was computed; its tokens
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # lost its slot and blocks; tokens that were computed
    RESUMED = "resumed"  # has them again; tokens that need not be computed once more


class TimelineEvent(NamedTuple):
    """Something that happened."""

    kind: EventKind
    at_s: float  # engine clock
    num_tokens: int = 0
    output_index: int = 0


class RequestTimeline:
    """One request's marks in the order of time."""

    __slots__ = ("marks", "num_dropped")

    def __init__(self) -> None:
        self.marks: list[TimelineEvent] = []
        self.num_dropped = 0

    def note(self, mark: TimelineEvent) -> None:
        """Remember it. What a request does once is kept in any case: phases are told apart by it."""
        if len(self.marks) < MAX_MARKS or mark.kind in (EventKind.ADMITTED, EventKind.FIRST_TOKEN):
            self.marks.append(mark)
        else:
            self.num_dropped += 1

    def time_of(self, kind: EventKind) -> float | None:
        """When it happened first; None if it has not."""
        return next((mark.at_s for mark in self.marks if mark.kind is kind), None)
