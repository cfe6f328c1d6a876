"""Phases of requests that were not sampled, kept for a while: should the request prove slow or failed, they are wanted
after all. Bounded; the oldest request's go first. Pure.
"""

import collections

from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.spans import Parent

MAX_REQUESTS = 2048
MAX_PHASES = 64  # of one request


class HeldSpans:
    """What waits, by request."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self.num_dropped = 0  # requests whose phases nobody asked for in time
        self._max = max_requests
        self._phases: collections.OrderedDict[str, list[tuple[Parent, Phase]]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._phases)

    def add(self, request_id: str, parent: Parent, phase: Phase) -> None:
        """Keep one phase."""
        phases = self._phases.setdefault(request_id, [])
        if len(phases) < MAX_PHASES:
            phases.append((parent, phase))
        if len(self._phases) > self._max:
            self._phases.popitem(last=False)
            self.num_dropped += 1

    def take(self, request_id: str) -> list[tuple[Parent, Phase]]:
        """What is kept of a request; it is forgotten here."""
        return self._phases.pop(request_id, [])
