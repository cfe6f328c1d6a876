"""Which open requests are sent again when a process of the ring was replaced, when, and which are not.

Pure: requests and times in, requests out; the gateway sends them. A request that has brought a token since it was last
sent is *proven*: it did not end its engine. Only a few unproven ones run at a time after a loss, so that a request
whose work ends its process is found: one that was alone unproven at a second loss is not sent a third time. When
several were, they go one by one.
"""

from collections.abc import Callable, Iterable, Set

from sluice_server.services.gateway.requests.open_request import OpenRequest

WINDOW = 8  # unproven requests at a time
PATIENCE_S = 1.0  # after which one that brings nothing (a long prompt, no credit) holds up the others no longer
STRICT_PATIENCE_S = 5.0  # the same while they go one by one


class Recovery:
    """The ring's losses, and the requests that they concern."""

    def __init__(self, way_of: Callable[[str], tuple[str, str, str]], timeout_s: float) -> None:
        """`way_of` names the tokenizer, engine and detokenizer of a request id."""
        self._way_of = way_of
        self._timeout_s = timeout_s
        self._lost_s: float | None = None
        self._is_planned = False
        self._one_by_one = False
        self._pending: dict[str, OpenRequest] = {}  # to be sent again, in the order in which they were opened
        self._under_way: dict[str, tuple[OpenRequest, float]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether requests wait to be sent again."""
        return bool(self._pending)

    def lost(self, now_s: float, *, planned: bool = False) -> None:
        """The ring is broken from now on; `planned`: by a restart that no request is to blame for."""
        self._is_planned = self._is_planned or planned
        if self._lost_s is None:
            self._lost_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether the ring has been broken for too long."""
        return self._lost_s is not None and now_s - self._lost_s > self._timeout_s

    def restored(self) -> None:
        """The ring serves again."""
        self._lost_s = None
        self._is_planned = False

    def missed(self, ids: Set[str], requests: Iterable[OpenRequest]) -> None:
        """Processes did not get all that was sent to them: whom it was about is unknown."""
        self.again([one for one in requests if self._is_affected(one, ids)])

    def replaced(self, ids: Set[str], requests: Iterable[OpenRequest]) -> OpenRequest | None:
        """Processes are new: what they knew of `requests` is gone. Gives the request to blame: alone unproven when a
        process ended that had ended with it before."""
        affected = [one for one in requests if self._is_affected(one, ids)]
        ran = [one for one in affected if one.envelope.request_id not in self._pending]
        suspects = [one for one in ran if one.is_unproven]
        if not self._is_planned:
            for request in ran:
                request.replay.losses.update(ids & set(self._way_of(request.envelope.request_id)))
        self.again(affected)
        repeated = [one for one in suspects if any(one.replay.losses[name] > 1 for name in ids)]
        if len(suspects) > 1:
            self._one_by_one = self._one_by_one or bool(repeated)
            return None
        return repeated[0] if repeated else None

    def again(self, requests: Iterable[OpenRequest]) -> None:
        """Have requests sent again."""
        for request in requests:
            self._pending[request.envelope.request_id] = request
            self._under_way.pop(request.envelope.request_id, None)

    def due(self, now_s: float) -> list[OpenRequest]:
        """Requests to send again now."""
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

    def _is_affected(self, request: OpenRequest, ids: Set[str]) -> bool:
        if request.is_own or request.outcome is not None:
            return False
        tokenizer, engine, detokenizer = self._way_of(request.envelope.request_id)
        if engine in ids or detokenizer in ids:
            return True
        # A tokenizer knows nothing any more of a request that has brought tokens; what its client says passes there.
        return tokenizer in ids and (request.is_unproven or bool(request.replay.changes))
