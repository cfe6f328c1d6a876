"""Keeps an engine from its next step for a moment, so that the first token of a request alone is carried at once.

An engine on CPUs computes on all cores. The threads that carry a token (of ZeroMQ, detokenizer, gateway and client) run
several times each for one, and Linux lets a thread that has just run wait behind one that computes, until the clock's
next tick: up to 4 ms. Beside other requests there is no pause: theirs would wait for it.
"""

import time
from collections.abc import Callable, Collection

from sluice_server.engine.executor.computing import Computing

PAUSE_S = 0.0003  # half of a token's way; for the rest, the next step is planned, on one core


class FirstTokenPause:
    """Pauses of one engine."""

    def __init__(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """`seconds` 0: there are none."""
        self._seconds = seconds
        self._sleep = sleep
        self._request_id = ""  # whose first token was sent last, if no step has begun since

    def note(self, request_id: str) -> None:
        """Notes that a request has its first token."""
        self._request_id = request_id

    def before_step(self, open_ids: Collection[str]) -> None:
        """Waits, if the engine has one request, and that one's first token was sent behind the last step."""
        request_id, self._request_id = self._request_id, ""
        if self._seconds and len(open_ids) == 1 and request_id in open_ids:
            self._sleep(self._seconds)


def pause_of(computing: Computing, num_cores: int) -> FirstTokenPause:
    """Returns the pauses of an engine that computes like this on so many cores: none if it leaves a core to others."""
    return FirstTokenPause(PAUSE_S if computing.threads >= num_cores else 0.0)
