"""Holds the phases of unsampled requests for a while, in case a request turns out to be slow or failed.

Bounded: the oldest request's phases are dropped first. Pure: no I/O, no clock.
"""

import collections

from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.spans import Parent

MAX_REQUESTS = 2048
MAX_PHASES = 64  # kept per request


class HeldSpans:
    """The held phases, by request."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self.num_dropped = 0  # requests whose phases were dropped before they were taken
        self._max = max_requests
        self._phases: collections.OrderedDict[str, list[tuple[Parent, Phase]]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._phases)

    def add(self, request_id: str, parent: Parent, phase: Phase) -> None:
        """Hold one phase."""
        phases = self._phases.setdefault(request_id, [])
        if len(phases) < MAX_PHASES:
            phases.append((parent, phase))
        if len(self._phases) > self._max:
            self._phases.popitem(last=False)
            self.num_dropped += 1

    def take(self, request_id: str) -> list[tuple[Parent, Phase]]:
        """Remove and return the held phases of a request."""
        return self._phases.pop(request_id, [])
