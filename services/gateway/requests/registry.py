"""The open requests of a gateway, and how the last few thousand others ended. Pure."""

import collections
from collections.abc import Iterator

from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus


class OpenRequests:
    """Open requests by request id, and the final status of the last `num_remembered` others."""

    def __init__(self, num_remembered: int = 4096) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._linked: dict[str, OpenRequest] = {}  # by further ids that a request has in the ring
        self._ended: collections.OrderedDict[str, tuple[str, RequestStatus]] = collections.OrderedDict()
        self._num_remembered = num_remembered

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._open.values()))

    def add(self, request: OpenRequest) -> None:
        """Adds an open request."""
        self._open[request.request_id] = request

    def link(self, ring_id: str, request: OpenRequest) -> None:
        """Finds an open request by a further id, too."""
        self._linked[ring_id] = request

    def unlink(self, ring_id: str) -> None:
        """Ends what `link` began."""
        self._linked.pop(ring_id, None)

    def get(self, request_id: str) -> OpenRequest | None:
        """Returns the open request with this id, or None."""
        return self._open.get(request_id) or self._linked.get(request_id)

    def is_known(self, request_id: str) -> bool:
        """Whether a request is open, or among the last that were."""
        return request_id in self._open or request_id in self._ended

    def state(self, request_id: str, tenant: str) -> RequestStatus | None:
        """Returns the status of a request, open or ended; None if it is unknown, forgotten or another tenant's."""
        request = self._open.get(request_id)
        found = (request.envelope.tenant, request.state) if request else self._ended.get(request_id)
        return found[1] if found is not None and found[0] == tenant else None

    def remove(self, request: OpenRequest) -> bool:
        """Removes a request and remembers its status; returns False if it was removed before."""
        request_id = request.request_id
        self.unlink(request.envelope.request_id)
        if self._open.pop(request_id, None) is None:
            return False
        self._ended[request_id] = (request.envelope.tenant, request.state)
        if len(self._ended) > self._num_remembered:
            self._ended.popitem(last=False)
        return True
