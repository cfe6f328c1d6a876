"""Sends requests into the ring, attempt after attempt, each of which one engine computes. `emit` never blocks."""

from collections.abc import Callable, Iterable

import msgspec

from sluice_server.services.gateway.requests.adapters import is_unbound
from sluice_server.services.gateway.requests.engines import Engines
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Cancel, Message, Submit
from sluice_server.services.messages.work import Generate


class Attempts:
    """The attempts of a gateway's requests, and the engines that have them."""

    def __init__(self, engines: Engines, emit: Callable[[Message], None]) -> None:
        self._engines = engines
        self._emit = emit

    @staticmethod
    def trace(request: OpenRequest) -> None:
        """Makes the span of a request's trace the parent of what the ring records."""
        traceparent = request.trace.traceparent
        if traceparent != request.envelope.traceparent:
            request.envelope = msgspec.structs.replace(request.envelope, traceparent=traceparent)

    def first(self, request: OpenRequest) -> None:
        """Sends a traced request. Prompts may go to any engine that serves, if a tokenizer chooses."""
        assert not is_unbound(request.asked), "a request is sent without the adapter that it names"
        envelope = request.envelope
        able = self._engines.able if isinstance(request.asked.work, Generate) and not request.is_own else ()
        request.able = able
        self._emit(Submit(envelope=envelope, work=request.asked.work, resume=request.asked.resume, able=able))

    def again(self, request: OpenRequest, now_s: float) -> None:
        """Sends a request behind the tokens that came. Messages of older attempts are dropped.

        An engine that no longer has the request gets a Cancel: it may be alive, and only out of reach.
        """
        assert not is_unbound(request.asked), "a request is sent without the adapter that it names"
        before = request.envelope
        self._engines.give_back(before.engine)
        engine = self._engines.take(before.request_id, before.engine)
        for name in request.engines:
            if name != engine:
                self._emit(Cancel(msgspec.structs.replace(before, engine=name)))
        request.able = ()
        resume = request.send_again(now_s, engine)
        self._emit(Submit(envelope=request.envelope, work=request.work_now(), resume=resume))
        for cancel in request.cancels():
            self._emit(cancel)

    def answered(self, request: OpenRequest, engine: str) -> None:
        """Notes the engine that a tokenizer has chosen, as the first message of an attempt names it."""
        request.able = ()
        if engine != request.envelope.engine:
            self._engines.give_back(request.envelope.engine)
            request.envelope = msgspec.structs.replace(request.envelope, engine=self._engines.hold(engine))

    def disown(self, engine: str, requests: Iterable[OpenRequest]) -> None:
        """Sends an engine that was out of reach Cancels of the attempts that other engines have taken over."""
        for request in requests:
            now = request.envelope
            if now.engine != engine and now.attempt:
                self._emit(Cancel(msgspec.structs.replace(now, engine=engine, attempt=now.attempt - 1)))
