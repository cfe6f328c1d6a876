"""All open requests of a gateway, and how the last few thousand others ended. Pure.

Messages of the ring find their request here; what is late, stale, doubled or unknown is dropped and counted.
"""

import collections
from collections.abc import Callable, Iterator

from engine.errors import Code
from services.gateway.contract.errors import from_failed
from services.gateway.requests.open_requests import OpenRequest, RequestStatus
from services.messages.details import Scored, Tokenized
from services.messages.messages import Failed, Preempted, Result, Text


class OpenRequests:
    """All of them, by id, and how the last few thousand others ended."""

    def __init__(self, on_drop: Callable[[str], None], num_remembered: int = 4096) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._ended: collections.OrderedDict[str, tuple[str, RequestStatus]] = collections.OrderedDict()
        self._on_drop = on_drop
        self._num_remembered = num_remembered

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._open.values()))

    def add(self, request: OpenRequest) -> None:
        """Open it."""
        self._open[request.envelope.request_id] = request

    def get(self, request_id: str) -> OpenRequest | None:
        """The open request of that id."""
        return self._open.get(request_id)

    def state(self, request_id: str, tenant: str) -> RequestStatus | None:
        """Where it stands or how it ended; None if unknown, forgotten or another tenant's."""
        request = self._open.get(request_id)
        found = (request.envelope.tenant, request.state) if request else self._ended.get(request_id)
        return found[1] if found is not None and found[0] == tenant else None

    def remove(self, request: OpenRequest) -> bool:
        """Close it; False if it was closed already."""
        request_id = request.envelope.request_id
        if self._open.pop(request_id, None) is None:
            return False
        self._ended[request_id] = (request.envelope.tenant, request.state)
        if len(self._ended) > self._num_remembered:
            self._ended.popitem(last=False)
        return True

    def deliver(self, message: Text | Failed | Result | Preempted, now_s: float) -> str:
        """Hand a message of the ring to its request; drop and count what is late, stale, doubled or unknown.

        Gives the reason if it was dropped, else "".
        """
        envelope = message.envelope
        request = self._open.get(envelope.request_id)
        if request is None:
            dropped = "unknown"
        elif envelope.attempt != request.envelope.attempt:
            dropped = "stale_attempt"
        elif request.outcome is not None:
            dropped = "ended"
        elif isinstance(message, Text):
            dropped = request.receive(message, now_s)
        else:
            dropped = _hand_over(request, message)
        if dropped:
            self._on_drop(dropped)
        return dropped


_OUR_FAULT = (Code.INTERNAL, Code.UNAVAILABLE)


def _hand_over(request: OpenRequest, message: Failed | Result | Preempted) -> str:
    if isinstance(message, Preempted):
        request.is_preempted = True
        request.on_news()
        return ""
    if isinstance(message, Result) and isinstance(message.value, Tokenized | Scored) and request.asked.tells_prompt:
        if request.prompt is not None:
            return "duplicate"  # of a later attempt
        request.prompt = message.value
        request.on_news()
        return ""
    # What broke may go on in other processes of its way.
    request.ring_knows_end = not (isinstance(message, Failed) and message.code in _OUR_FAULT)
    if isinstance(message, Failed):
        request.end(from_failed(message))
    elif not isinstance(message.value, Scored):
        request.end(message.value)
    return ""
