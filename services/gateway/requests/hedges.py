"""Sends requests whose engine is slow to a second engine as well; the one that brings a token first goes on.

Tokens depend on their seed and position only, so both engines would bring the same ones. The second attempt has an id
and a serial of its own in the ring: the two share no state there, and what the slower one still brings is dropped. Time
is passed in; `emit` never blocks.
"""

from collections.abc import Callable, Sequence

import msgspec

from sluice_server.services.gateway.requests.adapters import is_unbound
from sluice_server.services.gateway.requests.engines import Engines
from sluice_server.services.gateway.requests.envelope import Serials
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.registry import OpenRequests
from sluice_server.services.messages.details import Routed, RoutingReason
from sluice_server.services.messages.messages import Cancel, Envelope, Message, Submit, Text
from sluice_server.services.messages.work import Generate
from sluice_server.services.ring.peers import peer_of

MOST_SHARE = 0.1  # of the open requests: where every engine is slow, second attempts make all of them slower


class Hedges:
    """The second attempts of a gateway's requests."""

    def __init__(
        self,
        requests: OpenRequests,
        engines: Engines,
        tokenizers: Sequence[str],
        serials: Serials,
        emit: Callable[[Message], None],
    ) -> None:
        self._serials = serials
        self._requests = requests
        self._engines = engines
        self._tokenizers = tuple(tokenizers)
        self._emit = emit
        self._num = 0
        self._since: dict[int, tuple[int, int, float]] = {}  # by serial: attempt, tokens, and when they were first seen

    def look(self, now_s: float, delay_s: float, new_id: Callable[[], str]) -> list[OpenRequest]:
        """Begins second attempts of requests that have brought no token for `delay_s`, the oldest requests first;
        returns these requests."""
        begun = []
        since, self._since = self._since, {}
        for request in self._requests:
            if request.hedge is not None and request.hedge.engine not in self._engines.serving:
                self.drop(request)
            attempt, num = request.envelope.attempt, request.num_tokens
            known = since.get(request.envelope.serial, (-1, 0, now_s))
            first_s = known[2] if known[:2] == (attempt, num) else now_s
            self._since[request.envelope.serial] = attempt, num, first_s
            if now_s - first_s >= delay_s and self._has_room and self._may_begin(request):
                self._begin(request, now_s, self._fit(new_id, request.envelope.request_id))
                begun.append(request)
        return begun

    def settles(self, request: OpenRequest, message: Message, envelope: Envelope) -> bool:
        """Whether a message is of the attempt that goes on. The first text of either attempt ends the other."""
        is_text = isinstance(message, Text)
        if envelope.request_id == request.envelope.request_id:
            if is_text and envelope.attempt == request.envelope.attempt:
                self.drop(request)
            return True
        hedge = request.hedge
        if hedge is None or envelope.request_id != hedge.request_id:
            return False  # of an attempt that was too slow
        if is_text and request.outcome is None:
            self._take_over(request, hedge, envelope.engine)
        elif not is_text:
            self.drop(request)
        return is_text

    def drop(self, request: OpenRequest) -> None:
        """Ends a request's second attempt, if it has one."""
        hedge, request.hedge = request.hedge, None
        if hedge is None:
            return
        self._num -= 1
        self._requests.unlink(hedge.request_id)
        self._engines.give_back(hedge.engine)
        self._emit(Cancel(hedge))

    @property
    def _has_room(self) -> bool:
        return self._num < max(1.0, MOST_SHARE * len(self._requests))

    def _may_begin(self, request: OpenRequest) -> bool:
        """Whether a second attempt of a request can be told apart from its first by nothing but its speed."""
        asked = request.asked
        is_ours = request.is_own or request.outcome is not None or request.hedge is not None or request.awaits_images
        if is_ours or not isinstance(asked.work, Generate) or asked.is_search or is_unbound(asked):
            return False
        scheduling = asked.work.scheduling
        is_changed = scheduling.is_open or scheduling.credit is not None or bool(request.replay.changes)
        is_served = bool(request.able) or request.envelope.engine in self._engines.serving
        return is_served and not is_changed and not asked.tells_prompt and bool(self._engines.beside(request.engines))

    def _begin(self, request: OpenRequest, now_s: float, ring_id: str) -> None:
        before = request.envelope
        able = request.able  # then the tokenizer knows which of them has the request
        engine = self._engines.hold(self._engines.beside(request.engines))
        stamped = request.replay.restamped(before, now_s)
        hedge = msgspec.structs.replace(stamped, request_id=ring_id, engine=engine, serial=self._serials.next())
        request.hedge = hedge
        self._num += 1
        self._requests.link(ring_id, request)
        beside = before.request_id if able else ""
        self._emit(Submit(hedge, request.work_now(), request.resume_now(), able, beside))

    def _take_over(self, request: OpenRequest, hedge: Envelope, engine: str) -> None:
        """Lets the second attempt go on, and ends the first."""
        for name in request.engines:
            self._emit(Cancel(msgspec.structs.replace(request.envelope, engine=name)))
        self._engines.give_back(request.envelope.engine)
        self._engines.give_back(hedge.engine)
        self._requests.unlink(request.envelope.request_id)
        request.envelope = msgspec.structs.replace(hedge, engine=self._engines.hold(engine or hedge.engine))
        request.routed, request.able, request.hedge = Routed(RoutingReason.HEDGE), (), None
        self._engines.routed[request.envelope.engine, RoutingReason.HEDGE] += 1
        self._num -= 1

    def _fit(self, new_id: Callable[[], str], beside: str) -> str:
        """Returns an id that goes to the tokenizer of another one, which knows where that went."""
        wanted, found = peer_of(beside, self._tokenizers), new_id()
        while peer_of(found, self._tokenizers) != wanted:
            found = new_id()
        return found
