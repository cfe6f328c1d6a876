"""When streams are told of new text: at once while there is little of it, together at intervals when there is much.

A gRPC message costs far more than a token, so that a gateway that sends every token alone is what limits a busy
service. Here all streams with new text are woken together, at most every `interval`: open streams ÷ deltas a second,
at most `MAX_INTERVAL_S`. A stream's first text never waits, its end never does either. Clock and timer are passed in.
"""

from collections.abc import Callable

from services.gateway.requests.open_requests import OpenRequest

DELTAS_PER_S = 800  # of one gateway; about a tenth of a core: each costs what six tokens do
MAX_INTERVAL_S = 0.04  # a frame of a film: nobody sees text stand still for so short a time


class Pace:
    """Wakes the handlers of streams."""

    def __init__(
        self,
        num_open: Callable[[], int],
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._num_open = num_open
        self._clock = clock
        self._call_later = call_later
        self._due: dict[OpenRequest, None] = {}  # in order of arrival
        self._woken_s = 0.0

    @property
    def interval_s(self) -> float:
        """Time between two rounds of waking."""
        return min(self._num_open() / DELTAS_PER_S, MAX_INTERVAL_S)

    def text_came(self, request: OpenRequest) -> None:
        """There is text for a stream."""
        if request.last_seq == 0:
            request.on_news()
            return
        if not self._due:  # the round is called after all that came with this text
            self._call_later(max(0.0, self._woken_s + self.interval_s - self._clock()), self._wake)
        self._due[request] = None

    def _wake(self) -> None:
        due, self._due = self._due, {}
        self._woken_s = self._clock()
        for request in due:
            request.on_news()
