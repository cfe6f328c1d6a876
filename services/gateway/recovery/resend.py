"""Decides which open requests are sent again after a process of the ring was replaced, and when.

Pure: requests and times in, requests out; the gateway sends them. A request that has brought a token since it was last
sent is *proven*: it did not crash its engine. After a loss only a few unproven requests run at a time, so that a
request whose work crashes its process is found. A request that was the only unproven one at a second loss is not sent a
third time. If there were several, they are sent one by one. Losses count by process: of several engines that are
ended from outside, one after the other, none is a request's fault.
"""

from collections.abc import Callable, Iterable, Set

from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Envelope

WINDOW = 8  # unproven requests at a time
PATIENCE_S = 1.0  # an unproven request (long prompt, no credit) delays the others no longer than this
STRICT_PATIENCE_S = 5.0  # the same while requests are sent one by one


class Recovery:
    """The losses of the ring, and the requests that must be sent again.

    Attributes:
        is_planned: the ring is broken by a planned restart.
    """

    def __init__(self, route_of: Callable[[Envelope], tuple[str, str, str]], timeout_s: float) -> None:
        """`route_of` returns the tokenizer, engine and detokenizer of an attempt. `timeout_s`: how long requests may
        wait."""
        self._route_of = route_of
        self._timeout_s = timeout_s
        self._lost_s: float | None = None
        self.is_planned = False
        self._one_by_one = False
        self._pending: dict[str, OpenRequest] = {}  # to be sent again, in the order in which they were opened
        self._under_way: dict[str, tuple[OpenRequest, float]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether requests wait to be sent again."""
        return bool(self._pending)

    def lost(self, now_s: float, *, planned: bool = False) -> None:
        """Marks the ring as broken; `planned`: by a restart that no request caused."""
        self.is_planned = self.is_planned or planned
        if self._lost_s is None:
            self._lost_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether the ring has been broken for longer than `timeout_s`."""
        return self._lost_s is not None and now_s - self._lost_s > self._timeout_s

    def restored(self) -> None:
        """Marks the ring as working again."""
        self._lost_s = None
        self.is_planned = False

    def missed(self, ids: Set[str], requests: Iterable[OpenRequest]) -> None:
        """Queues all requests of processes that lost frames: which requests the frames were about is unknown."""
        self.again([one for one in requests if self._is_affected(one, ids)])

    def replaced(self, ids: Set[str], requests: Iterable[OpenRequest], *, planned: bool = False) -> OpenRequest | None:
        """Queues the requests of processes whose state is lost. Returns the request to fail, or None: the only unproven
        one, when a process has ended with it for the second time."""
        affected = [one for one in requests if self._is_affected(one, ids)]
        ran = [one for one in affected if one.request_id not in self._pending]
        suspects = [one for one in ran if one.is_unproven]
        if not (planned or self.is_planned):
            for request in ran:
                request.replay.losses.update(self._worked(request, ids))
        self.again(affected)
        repeated = [one for one in suspects if any(one.replay.losses[name] > 1 for name in self._worked(one, ids))]
        if len(suspects) > 1:
            self._one_by_one = self._one_by_one or bool(repeated)
            return None
        return repeated[0] if repeated else None

    def again(self, requests: Iterable[OpenRequest]) -> None:
        """Queues requests to be sent again."""
        for request in requests:
            self._pending[request.request_id] = request
            self._under_way.pop(request.request_id, None)

    def due(self, now_s: float) -> list[OpenRequest]:
        """Returns the requests to send again now."""
        if self._lost_s is not None:
            return []
        window, patience_s = (1, STRICT_PATIENCE_S) if self._one_by_one else (WINDOW, PATIENCE_S)
        self._under_way = {
            name: (request, sent_s)
            for name, (request, sent_s) in self._under_way.items()
            if request.outcome is None and request.is_unproven and now_s - sent_s < patience_s
        }
        due: list[OpenRequest] = []
        while self._pending and len(self._under_way) < window:
            name = next(iter(self._pending))
            request = self._pending.pop(name)
            if request.outcome is None:
                self._under_way[name] = (request, now_s)
                due.append(request)
        if not self._pending and not self._under_way:
            self._one_by_one = False
        return due

    def _worked(self, request: OpenRequest, ids: Set[str]) -> list[str]:
        """Returns which of these processes worked on the request, as far as that is known."""
        if request.able:
            return []
        return [name for name in self._route_of(request.envelope) if name in ids]

    def _is_affected(self, request: OpenRequest, ids: Set[str]) -> bool:
        if request.is_own or request.outcome is not None:
            return False
        tokenizer, engine, detokenizer = self._route_of(request.envelope)
        if engine in ids or detokenizer in ids or not ids.isdisjoint(request.able):
            return True
        # A tokenizer keeps no state of a request that has brought tokens, but its client's changes pass through there.
        return tokenizer in ids and (request.is_unproven or bool(request.replay.changes))
