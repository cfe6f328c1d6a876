"""Sends requests into the ring, attempt after attempt, each of which one engine computes. `emit` never blocks."""

from collections.abc import Callable, Iterable

import msgspec

from sluice_server.services.gateway.requests.adapters import is_unbound
from sluice_server.services.gateway.requests.engines import Engines
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Routed, RoutingReason
from sluice_server.services.messages.messages import Cancel, Message, Submit
from sluice_server.services.messages.work import Generate
from sluice_server.services.telemetry.observed import Observer


class Attempts:
    """The attempts of a gateway's requests, and the engines that have them."""

    def __init__(self, engines: Engines, observer: Observer, emit: Callable[[Message], None]) -> None:
        self._engines = engines
        self._observer = observer
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
        envelope, work = request.envelope, request.asked.work
        if isinstance(work, Generate) and not request.is_own:
            request.able = () if request.session else self._engines.able(may_move=_may_move(work))
        self._count(request)
        self._emit(Submit(envelope=envelope, work=work, resume=request.asked.resume, able=request.able))

    def hands_off(self, request: OpenRequest) -> bool:
        """Whether a request is to go on at another engine, as it has its first token from one that computes prompts
        only."""
        if not self._engines.hands_off(request.envelope.engine):
            return False
        return request.outcome is None and request.num_tokens > 0 and not request.is_own

    def again(self, request: OpenRequest, now_s: float, *, is_hand_off: bool = False) -> None:
        """Sends a request behind the tokens that came. Messages of older attempts are dropped. At a hand-off a
        tokenizer may choose the engine; it finds the blocks of the prompt at the one before.

        An engine that no longer has the request gets a Cancel: it may be alive, and only out of reach.
        """
        assert not is_unbound(request.asked), "a request is sent without the adapter that it names"
        before = request.envelope
        self._engines.give_back(before.engine)
        engine, reason = self._engines.take(before.request_id, before.engine, request.session)
        request.routed = Routed(RoutingReason.HAND_OFF if is_hand_off else reason)
        for name in request.engines:
            if name != engine:
                self._emit(Cancel(msgspec.structs.replace(before, engine=name)))
        request.able = self._engines.able(may_move=False) if is_hand_off and not request.session else ()
        resume = request.send_again(now_s, engine)
        self._emit(Submit(envelope=request.envelope, work=request.work_now(), resume=resume, able=request.able))
        for cancel in request.cancels():
            self._emit(cancel)
        self._count(request)

    def note(self, request: OpenRequest, event: str) -> None:
        """Records why a request was sent again."""
        self._observer.count(event)
        request.trace.happened(event, attempt=request.envelope.attempt)

    def stop(self, request: OpenRequest, output_index: int) -> None:
        """Cancels an output that the detokenizer ended at a stop string or a tool call: the engine would compute on."""
        if request.outcome is None:  # the other outputs go on
            self._emit(Cancel(envelope=request.envelope, output_index=output_index))

    def _count(self, request: OpenRequest) -> None:
        """Counts an attempt of a client's request whose engine is known."""
        if not request.able and not request.is_own:
            self._engines.routed[request.envelope.engine, request.routed.reason] += 1

    def answered(self, request: OpenRequest, engine: str, routed: Routed | None) -> None:
        """Notes the engine that a tokenizer has chosen, as the first message of an attempt names it, and why."""
        request.able = ()
        if engine != request.envelope.engine:
            self._engines.give_back(request.envelope.engine)
            request.envelope = msgspec.structs.replace(request.envelope, engine=self._engines.hold(engine))
        if routed is not None:
            request.routed = routed
            self._count(request)

    def disown(self, engine: str, requests: Iterable[OpenRequest]) -> None:
        """Sends an engine that was out of reach Cancels of the attempts that other engines have taken over."""
        for request in requests:
            now = request.envelope
            if now.engine != engine and now.attempt:
                self._emit(Cancel(msgspec.structs.replace(now, engine=engine, attempt=now.attempt - 1)))


def _may_move(work: Generate) -> bool:
    """Whether a request may go on at another engine behind its first token, with the blocks of its prompt: a search
    would begin anew, what bypasses the cache finds no blocks, and log probabilities of a prompt are computed again."""
    params = work.params
    is_bound = params.is_search or params.prompt_logprobs >= 0 or work.scheduling.bypasses_cache
    return not is_bound and params.max_tokens != 1
