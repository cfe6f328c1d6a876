"""The engine stage of the ring: takes Prompt, Inputs, AdapterCall, gives Tokens, Result or Failed; one step per turn.

This is the place where ring messages become engine requests and engine results become messages.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.executor.computing import UNKNOWN, Computing
from sluice_server.engine.kv_cache.prefix import tenant_root
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.scheduler.events import RequestTimes, Sampled
from sluice_server.engine.scheduler.validation import salt_of
from sluice_server.services.engine.adapter_calls import AdapterCalls
from sluice_server.services.engine.answers import admitted_of, last_times, logprobs_of, scores_of, timings_of
from sluice_server.services.engine.cache_reports import CacheReports
from sluice_server.services.engine.changes import carry_out
from sluice_server.services.engine.failures import told_to_client
from sluice_server.services.engine.first_token_pause import FirstTokenPause
from sluice_server.services.engine.load_reports import LoadReports
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.requests import request_of
from sluice_server.services.engine.trace import EngineTrace, RequestEnd, TracedRequest, attributes_of
from sluice_server.services.engine.vectors import VectorRequests
from sluice_server.services.messages.messages import (
    AdapterCall,
    Append,
    Cancel,
    Change,
    CloseInput,
    Envelope,
    Failed,
    Grant,
    Inputs,
    Message,
    OpenSerials,
    Preempted,
    Prompt,
    Result,
    Tokens,
    Update,
    failed,
)
from sluice_server.services.messages.processes import CacheQuery
from sluice_server.services.telemetry.gathering import Defer, at_once
from sluice_server.services.telemetry.phases import Record

Emit = Callable[[Message], None]


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that the engine is working on, as the ring sees it."""

    prompt: Prompt
    traced: TracedRequest | None  # None: the request is not traced
    num_changes: int = 0  # changes received


class EngineStage:
    """Drives one engine from the ring's messages."""

    def __init__(
        self,
        engine: Engine,
        place: RingMembership,
        emit: Emit,
        record: Record,
        computing: Computing = UNKNOWN,
        defer: Defer = at_once,
    ) -> None:
        """`computing`: how the engine computes, for its reports. `defer`: see `EngineTrace`."""
        self.engine = engine
        self.ended: dict[str, int] = {}  # requests by kind of end; "stale": an attempt that came too late
        self.errors: Counter[str] = Counter()  # failed requests by reason
        # Called with tenant and seconds in the queue; and before the engine gets a request.
        self.on_scheduled: Callable[[str, float], None] = lambda tenant, seconds: None
        self.on_add: Callable[[EngineRequest], None] = lambda request: None
        self.on_sampled: Callable[[Sampled], None] | None = None  # called with what the engine sampled
        self.on_request: Callable[[], None] = lambda: None  # called when the ring brings a request
        self.on_step: Callable[[], None] | None = None  # called after each step
        self.pause = FirstTokenPause(0.0)  # none
        self._place = place
        self._emit = emit
        self._trace = EngineTrace(record, lambda: last_times(engine.runner), defer)
        self._open: dict[str, _Open] = {}
        self._vectors = VectorRequests(engine, place.leases, place.clock, emit, self._count)
        self._cache = CacheReports(engine, place.id, place.epoch, emit)
        self._adapters = AdapterCalls(engine, emit)
        self.reports = LoadReports(engine, place, emit, computing, self._adapters, self._cache.identity)

    @property
    def progress(self) -> int:
        """The number of layers computed since start."""
        return self.engine.runner.progress

    @property
    def num_open(self) -> int:
        """The number of requests with state in this process."""
        return len(self._open) + len(self._vectors)

    def is_open(self, request_id: str) -> bool:
        """Returns True if the engine is working on the request."""
        return request_id in self._open

    def handle(self, message: Message) -> None:
        """Handles Prompt, Inputs, AdapterCall, Cancel, OpenSerials, CacheQuery and changes; forwards Cancel,
        OpenSerials, Failed and Result.

        Raises TypeError for any other message.
        """
        match message:
            case Prompt():
                self.on_request()
                self._add(message)
            case Inputs():
                self.on_request()
                tenant = message.envelope.tenant
                self._cache.know(tenant_root(self.engine.identity.encoded(), tenant), tenant)
                self._vectors.add(message)
            case AdapterCall():
                self._adapters.handle(message)
            case Grant() | Append() | Update() | CloseInput():
                self._change(message)
            case Cancel():
                opened = self._open.get(message.envelope.request_id)
                if opened is not None and message.envelope.attempt >= opened.prompt.envelope.attempt:
                    self._cancel(message)
                self._vectors.cancel(message)
                self._emit(message)
            case OpenSerials():
                self._drop_ended(message.has_ended)
                self._emit(message)
            case Failed() | Result():
                self._emit(message)
            case CacheQuery():
                self._cache.start_again()
            case _:
                raise TypeError(f"an engine takes no {type(message).__name__}")

    def answer_loads(self) -> None:
        """Answers the loads of adapters that have been read."""
        self._adapters.turn()

    def turn(self) -> bool:
        """Runs one engine step, or `engine.idle` if there are no requests. Returns True if there is more work.

        Paused requests need steps too, because a deadline may pass.
        """
        self.answer_loads()
        again = self._step() if self._open or self.engine.has_work else self.engine.idle()
        self._cache.report()
        self.reports.report()
        return again

    def _step(self) -> bool:
        self.pause.before_step(self._open)
        start = self._place.clock()
        events = self.engine.step()
        if self.on_step is not None:
            self.on_step()
        if self._trace.wants_step(start):
            inside = [self._open[name].traced for name in {one.request_id for one in events.sampled}]
            self._trace.step(start, self._place.clock(), inside, sum(len(one.token_ids) for one in events.sampled))
        for sampled in events.sampled:
            if self.on_sampled is not None:
                self.on_sampled(sampled)
            self._emit(self._tokens(sampled))
        for request_id, error in self._vectors.take(events):
            self._fail(request_id, error)
        for request_id in events.preempted:
            if request_id in self._open:
                self._emit(Preempted(self._open[request_id].prompt.envelope))
        return self.engine.has_work

    def reap(self) -> None:
        """Drops requests whose gateway is gone."""
        self._drop_ended(self._place.leases.is_over)

    def _drop_ended(self, has_ended: Callable[[Envelope], bool]) -> None:
        for request_id, opened in list(self._open.items()):
            if has_ended(opened.prompt.envelope):
                self._drop(request_id)
        self._vectors.drop(has_ended)

    def _cancel(self, message: Cancel) -> None:
        """Drops the whole request silently, or cancels one output, which then ends by an engine event."""
        if message.output_index is None:
            self._drop(message.envelope.request_id)
        else:
            self.engine.cancel(message.envelope.request_id, message.output_index)

    def _change(self, message: Change) -> None:
        """Applies a client's change; a rejected one ends the request. Ignores changes of a request that has ended."""
        envelope = message.envelope
        opened = self._open.get(envelope.request_id)
        if opened is None or opened.prompt.envelope.attempt != envelope.attempt:
            return
        if message.index != opened.num_changes:
            self._drop(envelope.request_id)  # a change was lost: the replay that follows has all of them
            return
        opened.num_changes += 1
        try:
            carry_out(self.engine, message, self._place.clock())
        except ServiceError as error:
            self.engine.cancel(envelope.request_id)
            self._fail(envelope.request_id, error)

    def _drop(self, request_id: str) -> None:
        """Drops a request without a message to the gateway."""
        self.engine.cancel(request_id)
        self._trace.end(self._open.pop(request_id).traced, RequestEnd(self._place.clock(), is_cancelled=True))
        self._count("cancelled")

    def _add(self, prompt: Prompt) -> None:
        envelope = prompt.envelope
        self._place.leases.seen(envelope.origin, envelope.epoch)
        opened = self._open.get(envelope.request_id)
        if opened is not None:
            if envelope.attempt <= opened.prompt.envelope.attempt:
                self._count("stale")
                return
            self._drop(envelope.request_id)  # only one attempt may send tokens
        now = self._place.clock()
        traced = self._trace.begin(envelope, now)
        request = request_of(prompt, now, self.engine.identity, None if traced is None else traced.timeline)
        self._cache.know(salt_of(request), request.tenant)
        self.on_add(request)
        try:
            self.engine.add(request)
        except ServiceError as error:
            self._count("failed", error.reason)
            self._trace.end(traced, RequestEnd(self._place.clock(), error.reason))
            self._emit(failed(envelope, error))
            return
        self._open[envelope.request_id] = _Open(prompt, traced)

    def _tokens(self, sampled: Sampled) -> Tokens:
        opened = self._open[sampled.request_id]
        prompt = opened.prompt
        admitted = None
        if sampled.admission is not None:
            self.reports.has_served = True
            self.pause.note(sampled.request_id)
            admitted = admitted_of(prompt, sampled.admission, sampled.output_index)
        timings = None
        if sampled.times is not None:
            timings = timings_of(prompt, sampled.times)
            if sampled.is_last:
                self._finish(opened, sampled.times, sampled.first_index + len(sampled.token_ids))
        return Tokens(
            envelope=prompt.envelope,
            first_index=sampled.first_index,
            ids=sampled.token_ids,
            output_index=sampled.output_index,
            logprobs=tuple(logprobs_of(logprob) for logprob in sampled.logprobs),
            admitted=admitted,
            finish=sampled.finish,
            timings=timings,
            num_drafted=sampled.num_drafted,
            num_accepted=sampled.num_accepted,
            prompt=scores_of(prompt, sampled),
        )

    def _finish(self, opened: _Open, times: RequestTimes, num_tokens: int) -> None:
        """Ends a request with its last output."""
        envelope = opened.prompt.envelope
        self.on_scheduled(envelope.tenant, times.queue_s)
        self._trace.end(opened.traced, RequestEnd(times.end_s, attributes=attributes_of(times, num_tokens)))
        del self._open[envelope.request_id]
        self._count("finished")

    def _fail(self, request_id: str, error: ServiceError) -> None:
        opened = self._open.pop(request_id)
        error = told_to_client(opened.prompt.envelope, error)
        self._count("failed", error.reason)
        self._trace.end(opened.traced, RequestEnd(self._place.clock(), error.reason))
        self._emit(failed(opened.prompt.envelope, error))

    def _count(self, end: str, error: str = "") -> None:
        self.ended[end] = self.ended.get(end, 0) + 1
        if error:
            self.errors[error] += 1
