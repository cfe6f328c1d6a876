"""Phases of a request in the engine, from its timeline: by hand, and through a stage that preempts and fails."""

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.parallel.launches import RankTimes
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.engine.scheduler.events import RequestTimes
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.timeline import MAX_EVENTS, EventKind, RequestTimeline, TimelineEvent
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.engine.trace import STEP_INTERVAL_S, EngineTrace, RequestEnd, by_position, phases_of
from sluice_server.services.messages.messages import Cancel, Envelope, Message, Preempted, Prompt
from sluice_server.services.messages.work import Scheduling, Stops, pack_ids
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.gathering import Call
from sluice_server.services.telemetry.phases import Phase, PhaseEvent
from tests.services.test_stage_attempts import Nines

PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


def timeline(*timeline_events: TimelineEvent) -> RequestTimeline:
    made = RequestTimeline()
    for mark in timeline_events:
        made.note(mark)
    return made


def test_phases_touch_and_hold_what_happened_in_them() -> None:
    noted = timeline(
        TimelineEvent(EventKind.ADMITTED, 2.0, 16),
        TimelineEvent(EventKind.CHUNK, 3.0, 40),
        TimelineEvent(EventKind.CHUNK, 4.0, 8),
        TimelineEvent(EventKind.FIRST_TOKEN, 4.0),
        TimelineEvent(EventKind.PREEMPTED, 5.0, 60),
        TimelineEvent(EventKind.RESUMED, 6.0, 32, 1),
    )
    step = PhaseEvent(names.EVENT_STEP, 7.0, {})
    queue, prefill, decode = phases_of(1.0, noted, [step], RequestEnd(9.0, attributes={names.NUM_TOKENS: 5}))
    assert [(one.name, one.start_s, one.end_s) for one in (queue, prefill, decode)] == [
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 4.0),
        ("decode", 4.0, 9.0),
    ]
    assert [one.attributes["sluice.tokens"] for one in prefill.span_events] == [40, 8]
    assert prefill.attributes == {names.NUM_CACHED: 16} and decode.attributes == {names.NUM_TOKENS: 5}
    told = [(one.name, one.at_s) for one in decode.span_events]
    assert told == [(names.EVENT_PREEMPTED, 5.0), (names.EVENT_RESUMED, 6.0), (names.EVENT_STEP, 7.0)]
    assert decode.span_events[1].attributes == {names.NUM_TOKENS: 32, names.OUTPUT: 1}
    assert not any(one.error for one in (queue, prefill, decode))


def test_a_request_that_ends_early_says_where() -> None:
    (queue,) = phases_of(1.0, timeline(), [], RequestEnd(2.0, "DEADLINE_EXCEEDED"))
    assert (queue.name, queue.end_s, queue.error) == ("queue", 2.0, "DEADLINE_EXCEEDED")
    queue, prefill = phases_of(
        1.0, timeline(TimelineEvent(EventKind.ADMITTED, 1.5)), [], RequestEnd(2.0, is_cancelled=True)
    )
    assert queue.error == prefill.error == "" and names.CANCELLED not in queue.attributes
    assert prefill.attributes[names.CANCELLED] is True


def test_a_trail_is_bounded_and_keeps_what_tells_phases_apart() -> None:
    noted = timeline(
        *(TimelineEvent(EventKind.CHUNK, float(i), 1) for i in range(MAX_EVENTS + 5)),
        TimelineEvent(EventKind.FIRST_TOKEN, 999.0),
    )
    assert len(noted.timeline_events) == MAX_EVENTS + 1 and noted.num_dropped == 5
    assert noted.time_of(EventKind.FIRST_TOKEN) == 999.0 and noted.time_of(EventKind.ADMITTED) is None
    (*_, last) = phases_of(0.0, noted, [], RequestEnd(1000.0))
    assert last.attributes[names.NUM_EVENTS_DROPPED] == 5


class Rig:
    """A stage with a clock of its own, by which a step takes a second."""

    def __init__(self, num_blocks: int = 40, budget: int = 40) -> None:
        self.now = 0.0
        self.num_preempted = 0  # times that a client is told
        self.phases: list[tuple[str, Phase]] = []
        limits = Limits(context_length=100, vocab_size=400)
        lax = SchedulerSettings(watermark=-10.0)  # lets in what will not fit
        scheduler = Scheduler(KVCache(num_blocks, 4, True), limits, (2,), 4, budget, lax)
        place = RingMembership("engine-0", 1, clock=lambda: self.now)
        engine = Engine(scheduler, Nines(), clock=self.tick)
        self.stage = EngineStage(engine, place, self.emit, self.record)

    def tick(self) -> float:
        self.now += 0.5
        return self.now

    def emit(self, message: Message) -> None:
        self.num_preempted += isinstance(message, Preempted)

    def record(self, envelope: Envelope, phase: Phase) -> None:
        self.phases.append((envelope.request_id, phase))

    def ask(self, name: str, num_prompt: int, num: int, traceparent: str = PARENT) -> None:
        ids, params = pack_ids([5] * num_prompt), SamplingParams(max_tokens=num)
        envelope = Envelope(name, "g", traceparent=traceparent)
        self.stage.handle(Prompt(envelope, ids, params, Stops(), Scheduling(), 0.0))

    def run(self) -> None:
        while self.stage.turn():
            pass

    def of(self, name: str) -> dict[str, Phase]:
        return {phase.name: phase for request, phase in self.phases if request == name}


def test_chunks_preemptions_and_resumes_are_told() -> None:
    rig = Rig(num_blocks=14, budget=8)
    rig.ask("a", 20, 24)
    rig.ask("b", 20, 24)
    rig.run()
    for name in "ab":
        assert list(rig.of(name)) == ["queue", "prefill", "decode"]
    chunks = [one for one in rig.of("a")["prefill"].span_events if one.name == names.EVENT_CHUNK]
    assert sum(int(one.attributes[names.NUM_TOKENS]) for one in chunks) >= 16 and len(chunks) >= 2
    told = [one.name for name in "ab" for phase in rig.of(name).values() for one in phase.span_events]
    assert told.count(names.EVENT_PREEMPTED) == rig.stage.engine.scheduler.num_preemptions > 0
    assert rig.num_preempted == rig.stage.engine.scheduler.num_preemptions
    assert told.count(names.EVENT_RESUMED) == told.count(names.EVENT_PREEMPTED)


def test_steps_are_looked_at_now_and_then_and_linked() -> None:
    rig = Rig()
    rig.now = STEP_INTERVAL_S
    rig.ask("a", 4, 6)
    rig.ask("b", 4, 6, traceparent="")
    rig.run()
    steps = [phase for request, phase in rig.phases if not request]
    assert steps and all(step.name == names.SPAN_STEP and step.links == (PARENT,) for step in steps)
    assert steps[0].attributes == {names.NUM_ROWS: 2, names.NUM_TOKENS: 2}
    assert rig.of("b") == {}, "it is not traced"
    told = [one for phase in rig.of("a").values() for one in phase.span_events if one.name == names.EVENT_STEP]
    assert len(told) == len(steps)


def test_phases_of_ended_requests_are_made_later_and_in_order() -> None:
    found, waiting = list[tuple[str, str]](), list[Call]()
    trace = EngineTrace(lambda envelope, phase: found.append((envelope.request_id, phase.name)), defer=waiting.append)
    for name in "ab":
        traced = trace.begin(Envelope(name, "g", traceparent=PARENT), 0.0)
        assert traced is not None
        traced.timeline.note(TimelineEvent(EventKind.ADMITTED, 1.0))
        trace.end(traced, RequestEnd(2.0))
    trace.end(None, RequestEnd(2.0))
    assert not found and len(waiting) == 2, "none for a request that is not traced"
    for call in waiting:
        call()
    assert found == [(name, phase) for name in "ab" for phase in (names.SPAN_QUEUE, names.SPAN_PREFILL)]


def test_a_step_of_several_ranks_says_what_each_did() -> None:
    found: list[Phase] = []
    times = [RankTimes(0.5, 0.1), RankTimes(0.4, 0.2)]
    trace = EngineTrace(lambda _, phase: found.append(phase), lambda: times)
    trace.step(1.0, 2.0, [trace.begin(Envelope("a", "g", traceparent=PARENT), 0.0)], 1)
    (step,) = found
    assert [(one.name, one.at_s) for one in step.span_events] == [(names.EVENT_RANK, 2.0)] * 2
    last = step.span_events[1].attributes
    assert last == {names.RANK: 1, names.RANK_TIME: 0.4, names.RANK_SUMS: 0.2}


def test_cancelled_and_refused_requests_have_spans() -> None:
    rig = Rig()
    rig.ask("a", 4, 50)
    rig.stage.turn()
    rig.stage.handle(Cancel(Envelope("a", "g")))
    assert rig.of("a")["decode"].attributes[names.CANCELLED] is True
    rig.ask("c", 90, 50)
    assert rig.of("c")["queue"].error == "CONTEXT_LENGTH_EXCEEDED"


def test_drafts_are_told_by_their_place() -> None:
    times = RequestTimes(0.0, 0.0, 0.0, 0.0, 0, num_drafted=5, num_accepted=3, drafted_at=(3, 2), accepted_at=(2, 1))
    assert by_position(times) == "2/3 1/2"


def test_no_step_is_looked_at_while_no_request_is_traced() -> None:
    told: list[Phase] = []
    trace = EngineTrace(lambda envelope, phase: told.append(phase))
    late_s = 100 * STEP_INTERVAL_S
    assert trace.begin(Envelope("a", "g"), 0.0) is None and not trace.wants_step(late_s)
    traced = trace.begin(Envelope("b", "g", traceparent=PARENT), 0.0)
    assert trace.wants_step(late_s)
    trace.end(traced, RequestEnd(1.0))
    assert not trace.wants_step(late_s) and [one.name for one in told] == ["queue"]
