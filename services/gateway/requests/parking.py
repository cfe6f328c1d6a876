"""Generations that outlive their reader (DISCONNECT_ACTION_DETACH): who reads each now, and how long it waits for one.

Without a reader a generation goes on, and what it tells goes into its history. It is let go when nobody has come for it
in its time. The timer is passed in. Knows no call.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from engine.errors import Code, ServiceError, cancelled
from services.gateway.contract.errors import not_found
from services.gateway.requests.followed import TrackedRequest

HINT = (
    "it ran here without DISCONNECT_ACTION_DETACH, ended long ago, or never ran here: "
    "go on with the effective spec and the ids that you have"
)


class ScheduledCall(Protocol):
    """What `call_later` gives."""

    def cancel(self) -> None:
        """Do not call."""


class SessionReader(Protocol):
    """Whoever has a generation now."""

    def lose(self, error: ServiceError) -> None:
        """Another reader has taken it over."""


@dataclasses.dataclass(slots=True)
class _Place:
    """One generation: with a reader, or with a timer."""

    followed: TrackedRequest
    ttl_s: float
    reader: SessionReader | None
    timer: ScheduledCall | None = None


class DetachedSessions:
    """Every generation that outlives its reader, until its time is over."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], ScheduledCall], max_parked: int) -> None:
        self._call_later = call_later
        self._max_parked = max_parked
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, followed: TrackedRequest, reader: SessionReader) -> None:
        """`reader` has it now. Only those that outlive their readers are kept here."""
        ttl_s, request_id = followed.request.asked.detach_ttl_s, followed.request.envelope.request_id
        if ttl_s is not None:
            self._places.setdefault(request_id, _Place(followed, ttl_s, reader)).reader = reader

    def leave(self, followed: TrackedRequest, reader: SessionReader, error: ServiceError | None) -> None:
        """Its reader has gone, for `error` or at the end. A reader that lost it before leaves nothing."""
        place = self._places.get(followed.request.envelope.request_id)
        if place is None:
            followed.close(error)
        elif place.reader is reader:
            self._park(place)

    def take(self, request_id: str, tenant: str) -> TrackedRequest:
        """One for a new reader, who then enters; the one it has, if any, loses it. Raises ServiceError
        GENERATION_NOT_FOUND."""
        place = self._places.get(request_id)
        if place is None or place.followed.request.envelope.tenant != tenant:
            raise not_found("generation", request_id, HINT)
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None
        if place.reader is not None:
            place.reader.lose(_taken_over())
        return place.followed

    def _park(self, place: _Place) -> None:
        request = place.followed.request
        place.reader = None
        place.timer = self._call_later(place.ttl_s, lambda: self._forget(place))
        request.detach(lambda: _absorb(place.followed))
        _absorb(place.followed)
        parked = [one for one in self._places.values() if one.reader is None]
        if len(parked) > self._max_parked:
            self._forget(parked[0])

    def _forget(self, place: _Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None  # it calls with its place
        self._places.pop(place.followed.request.envelope.request_id, None)
        place.followed.close(cancelled())


def _absorb(followed: TrackedRequest) -> None:
    """Nobody reads: what came is remembered; what has ended holds nothing but its history."""
    request = followed.request
    while request.take():
        pass
    if request.outcome is not None:
        followed.close(request.outcome if isinstance(request.outcome, ServiceError) else None)


def _taken_over() -> ServiceError:
    return ServiceError(
        Code.ABORTED, "RESUMED_ELSEWHERE", "another call of ResumeGenerate has taken over this generation"
    )
