"""Turns a request's timeline in the engine into phases, after its end: queue, prefill, decode.

A phase that did not begin is omitted; the phase in which a request failed or was cancelled says so. Sometimes a step is
sampled and becomes a span that is linked to its requests. Times are arguments; spans are made elsewhere.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from sluice_server.engine.parallel.launches import RankTimes
from sluice_server.engine.scheduler.events import RequestTimes
from sluice_server.engine.timeline import EventKind, RequestTimeline, TimelineEvent
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.gathering import Defer, at_once
from sluice_server.services.telemetry.phases import Phase, PhaseEvent, Record, Value

STEP_INTERVAL_S = 1.0  # between two sampled steps
MAX_LINKS = 32  # links of a sampled step
MAX_STEPS = 32  # sampled steps that a request's phases list
NO_REQUEST = Envelope("", "")  # the envelope of a step's span, which belongs to no request

_EVENTS = {
    EventKind.CHUNK: names.EVENT_CHUNK,
    EventKind.PREEMPTED: names.EVENT_PREEMPTED,
    EventKind.RESUMED: names.EVENT_RESUMED,
}


class RequestEnd(NamedTuple):
    """How a request ended: finished, failed with a reason, or cancelled; and the attributes of its last phase."""

    at_s: float
    error: str = ""
    is_cancelled: bool = False
    attributes: dict[str, Value] = {}


@dataclasses.dataclass(slots=True)
class TracedRequest:
    """An open request that is traced."""

    envelope: Envelope
    arrival_s: float
    timeline: RequestTimeline
    steps: list[PhaseEvent] = dataclasses.field(default_factory=list)


class EngineTrace:
    """Records the phases of requests, and some steps, through `record`."""

    def __init__(
        self, record: Record, ranks: Callable[[], Sequence[RankTimes]] = tuple, defer: Defer = at_once
    ) -> None:
        """`ranks` returns the times of each rank in the latest step; nothing where there is one. `defer` makes the
        phases of a request that has ended, later if it likes."""
        self._record = record
        self._ranks = ranks
        self._defer = defer
        self._looked_at_s = 0.0
        self._num_open = 0  # traced requests that have begun and not ended

    def begin(self, envelope: Envelope, now: float) -> TracedRequest | None:
        """Starts the trace of a request; returns None if it has no trace context."""
        if not envelope.traceparent:
            return None
        self._num_open += 1
        return TracedRequest(envelope, now, RequestTimeline())

    def end(self, traced: TracedRequest | None, end: RequestEnd) -> None:
        """Has the phases of a request that has ended recorded."""
        if traced is not None:
            self._num_open -= 1
            self._defer(functools.partial(self._tell, traced, end))

    def _tell(self, traced: TracedRequest, end: RequestEnd) -> None:
        attempt = traced.envelope.attempt
        for phase in phases_of(traced.arrival_s, traced.timeline, traced.steps, end):
            if attempt:
                phase = msgspec.structs.replace(phase, attributes={**phase.attributes, names.ATTEMPT: attempt})
            self._record(traced.envelope, phase)

    def wants_step(self, start_s: float) -> bool:
        """Returns True if the step that began at `start_s` is to be sampled: never while no open request is traced."""
        return self._num_open > 0 and start_s - self._looked_at_s >= STEP_INTERVAL_S

    def step(self, start_s: float, end_s: float, inside: Sequence[TracedRequest | None], num_tokens: int) -> None:
        """Records a sampled step that produced `num_tokens` for the requests `inside`, and adds it to their phases."""
        traced = [one for one in inside if one is not None]
        if not traced:
            return
        self._looked_at_s = start_s
        attributes: dict[str, Value] = {names.NUM_ROWS: len(inside), names.NUM_TOKENS: num_tokens}
        for one in traced:
            if len(one.steps) < MAX_STEPS:
                one.steps.append(PhaseEvent(names.EVENT_STEP, end_s, attributes))
        links = tuple(one.envelope.traceparent for one in traced[:MAX_LINKS])
        ranks = tuple(_rank_event(rank, end_s, times) for rank, times in enumerate(self._ranks()))
        self._record(NO_REQUEST, Phase(names.SPAN_STEP, start_s, end_s, attributes, ranks, links=links))


def _rank_event(rank: int, at_s: float, times: RankTimes) -> PhaseEvent:
    taken: dict[str, Value] = {names.RANK: rank, names.RANK_TIME: times.compute_s, names.RANK_SUMS: times.sums_s}
    return PhaseEvent(names.EVENT_RANK, at_s, taken)


def phases_of(arrival_s: float, timeline: RequestTimeline, steps: Sequence[PhaseEvent], end: RequestEnd) -> list[Phase]:
    """Returns the phases of a request, one after another without gaps; `steps` are its sampled steps."""
    admitted, first_token, marked = _read(timeline)
    begun: list[tuple[str, float, dict[str, Value]]] = [(names.SPAN_QUEUE, arrival_s, {})]
    if admitted is not None:
        begun.append((names.SPAN_PREFILL, admitted.at_s, {names.NUM_CACHED: admitted.num_tokens}))
    if first_token is not None:
        begun.append((names.SPAN_DECODE, first_token.at_s, {}))
    begun[-1][2].update(_at_end(timeline, end))
    span_events = sorted([*marked, *steps], key=lambda one: one.at_s) if steps else marked
    made: list[Phase] = []
    for (name, start_s, attributes), (_, end_s, _) in itertools.pairwise(begun):
        # A chunk ends with the step whose sample is the first token: it belongs to the prefill.
        num = sum(one.at_s <= end_s for one in span_events)
        made.append(Phase(name, start_s, max(start_s, end_s), attributes, tuple(span_events[:num])))
        span_events = span_events[num:]
    name, start_s, attributes = begun[-1]
    made.append(Phase(name, start_s, max(start_s, end.at_s), attributes, tuple(span_events), end.error))
    return made


def _read(timeline: RequestTimeline) -> tuple[TimelineEvent | None, TimelineEvent | None, list[PhaseEvent]]:
    """Returns the first admission, the first token, and the others as events of spans."""
    admitted = first_token = None
    marked: list[PhaseEvent] = []
    for mark in timeline.timeline_events:
        if mark.kind is EventKind.ADMITTED:
            admitted = admitted or mark
        elif mark.kind is EventKind.FIRST_TOKEN:
            first_token = first_token or mark
        else:
            marked.append(_span_event(mark))
    return admitted, first_token, marked


def _at_end(timeline: RequestTimeline, end: RequestEnd) -> dict[str, Value]:
    """Returns the attributes of a request's last phase."""
    found = dict(end.attributes)
    if end.is_cancelled:
        found[names.CANCELLED] = True
    if timeline.num_dropped:
        found[names.NUM_EVENTS_DROPPED] = timeline.num_dropped
    return found


def _span_event(mark: TimelineEvent) -> PhaseEvent:
    attributes: dict[str, Value] = {names.NUM_TOKENS: mark.num_tokens}
    if mark.output_index:
        attributes[names.OUTPUT] = mark.output_index
    return PhaseEvent(_EVENTS[mark.kind], mark.at_s, attributes)


def attributes_of(times: RequestTimes, num_tokens: int) -> dict[str, Value]:
    """Returns the attributes of the last phase of a request that finished with an output of `num_tokens`."""
    attributes: dict[str, Value] = {names.NUM_TOKENS: num_tokens, names.NUM_PREEMPTIONS: times.num_preemptions}
    attributes |= {names.NUM_DRAFTED: times.num_drafted, names.NUM_ACCEPTED: times.num_accepted}
    if times.drafted_at:
        attributes[names.ACCEPTED_AT] = by_position(times)
    return attributes


def by_position(times: RequestTimes) -> str:
    """Returns accepted/drafted for each position of the drafts, as text."""
    return " ".join(f"{kept}/{num}" for kept, num in zip(times.accepted_at, times.drafted_at, strict=True))
