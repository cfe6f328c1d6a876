"""Generations that outlive their reader (DISCONNECT_ACTION_DETACH): each with its present reader or its timer.

Without a reader a generation goes on, and its deltas go into its history. It ends when no reader has come before its
TTL is over. The timer is passed in. Independent of calls and transport.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from sluice_server.engine.errors import Code, ServiceError, cancelled
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest

HINT = (
    "it ran here without DISCONNECT_ACTION_DETACH, ended long ago, or never ran here: "
    "resume with the effective spec and the ids received"
)


class Timer(Protocol):
    """The handle that `call_later` returns."""

    def cancel(self) -> None:
        """Cancels the callback."""


class SessionReader(Protocol):
    """The present reader of a generation."""

    def lose(self, error: ServiceError) -> None:
        """Ends this reader with `error`: another reader has taken over."""


@dataclasses.dataclass(slots=True)
class DetachedSession:
    """One generation: with a reader, or with a timer."""

    request: OpenRequest
    ttl_s: float
    reader: SessionReader | None
    timer: Timer | None = None


class DetachedSessions:
    """All generations that may outlive their reader, by request id, until their TTL is over."""

    def __init__(
        self, manager: RequestManager, call_later: Callable[[float, Callable[[], None]], Timer], max_detached: int
    ) -> None:
        self._manager = manager
        self._call_later = call_later
        self._max_detached = max_detached
        self._sessions: dict[str, DetachedSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sessions

    def attach(self, request: OpenRequest, reader: SessionReader) -> None:
        """Makes `reader` the request's reader. Requests without a detach TTL are not recorded here."""
        ttl_s, request_id = request.asked.detach_ttl_s, request.request_id
        if ttl_s is not None:
            self._sessions.setdefault(request_id, DetachedSession(request, ttl_s, reader)).reader = reader

    def detach(self, request: OpenRequest, reader: SessionReader, error: ServiceError | None) -> None:
        """Removes `reader`, which ended with `error` or normally. Does nothing if another reader has taken over. A
        request without a detach TTL is closed."""
        session = self._sessions.get(request.request_id)
        if session is None:
            self._manager.close(request, error)
        elif session.reader is reader:
            self._wait_for_reader(session)

    def take(self, request_id: str, tenant: str) -> OpenRequest:
        """Returns the request for a new reader, which then attaches; a present reader loses it. Raises ServiceError
        GENERATION_NOT_FOUND."""
        session = self._sessions.get(request_id)
        if session is None or session.request.envelope.tenant != tenant:
            raise not_found("generation", request_id, HINT)
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        if session.reader is not None:
            session.reader.lose(_taken_over())
        return session.request

    def _wait_for_reader(self, session: DetachedSession) -> None:
        session.reader = None
        session.timer = self._call_later(session.ttl_s, lambda: self.forget(session))
        session.request.delivery.detach(lambda: self._absorb(session.request))
        self._absorb(session.request)
        waiting = [one for one in self._sessions.values() if one.reader is None]
        if len(waiting) > self._max_detached:
            self.forget(waiting[0])

    def forget(self, session: DetachedSession) -> None:
        """Ends a generation for which no reader has come in time."""
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None  # breaks a cycle: the timer's callback holds the session
        self._sessions.pop(session.request.request_id, None)
        self._manager.close(session.request, cancelled())

    def _absorb(self, request: OpenRequest) -> None:
        """Moves waiting messages into the history while there is no reader. A request that has ended is closed; its
        history stays."""
        while request.delivery.take():
            pass
        if request.outcome is not None:
            self._manager.close(request, request.outcome if isinstance(request.outcome, ServiceError) else None)


def _taken_over() -> ServiceError:
    return ServiceError(
        Code.ABORTED, "RESUMED_ELSEWHERE", "another call of ResumeGenerate has taken over this generation"
    )
