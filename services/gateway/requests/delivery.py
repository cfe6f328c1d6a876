"""What one request has for its reader: messages that wait, deltas by number, and how the reader is woken or let go.

While a reader is busy writing, messages gather here and leave as one delta; the first always leaves alone. Pure: no
clock and no loop; readers are woken by a callback.
"""

from collections.abc import Callable

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.requests.deltas import MAX_DELTA_BYTES, has_content, taken_of
from sluice_server.services.gateway.requests.history import History, num_bytes
from sluice_server.services.gateway.requests.progress import SlotLimits, WriteProgress
from sluice_server.services.messages.messages import Text


def _nothing() -> None:
    """Wakes nobody."""


def _ignore(error: ServiceError) -> None:
    """Nobody is told."""


class Delivery:
    """One request's messages on their way to its reader."""

    def __init__(self, *, streams: bool, num_outputs: int = 1, last_seq: int = 0) -> None:
        """`streams`: text is news, too, that is not the last; `last_seq`: deltas up to this one were told elsewhere."""
        self.last_seq = last_seq
        self.history: History | None = None  # of a request that outlives its reader
        self.progress = WriteProgress()
        self.on_news: Callable[[], None] = _nothing
        self.is_broken_off = False  # its reader is being let go
        self._interrupt: Callable[[ServiceError], object] = _ignore  # tells its reader that it is let go
        self._streams = streams
        self._has_one_output = num_outputs == 1
        self._waiting: list[Text] = []
        self._waiting_bytes = 0

    def attach(
        self, on_news: Callable[[], None], interrupt: Callable[[ServiceError], object], progress: WriteProgress
    ) -> None:
        """Somebody reads from now on."""
        self.on_news, self._interrupt, self.progress = on_news, interrupt, progress
        self.is_broken_off = False

    def detach(self, on_news: Callable[[], None] = _nothing) -> None:
        """Nobody reads any more."""
        self.attach(on_news, _ignore, WriteProgress())

    def break_off(self, error: ServiceError) -> None:
        """Let the reader go, who is told `error`."""
        self.is_broken_off = True
        self._interrupt(error)

    def add(self, text: Text) -> None:
        """A message waits for the reader."""
        self._waiting.append(text)
        self._waiting_bytes += num_bytes(text)

    def announce(self) -> None:
        """Wake a reader who wants text as it comes."""
        if self._streams:
            self.on_news()

    def take(self) -> list[Text]:
        """Messages of one output for the next delta: the first of all alone, later ones together up to
        `MAX_DELTA_BYTES`. Empty when nothing waits. The last of an output may hold nothing but its end: then there is
        no delta."""
        waiting = self._waiting
        if not waiting:
            return waiting
        if self.last_seq == 0:
            taken, self._waiting = waiting[:1], waiting[1:]
        elif self._waiting_bytes > MAX_DELTA_BYTES:
            taken, self._waiting = taken_of(waiting, MAX_DELTA_BYTES)
        elif self._has_one_output:
            taken, self._waiting = waiting, []
        else:
            taken, self._waiting = taken_of(waiting)
        self._waiting_bytes = self._waiting_bytes - sum([num_bytes(one) for one in taken]) if self._waiting else 0
        if has_content(taken):
            self.last_seq += 1
        if self.history is not None:
            self.history.add(self.last_seq, taken)
        return taken

    def take_all(self, index: int) -> list[Text]:
        """Everything that waits for one output."""
        taken = [one for one in self._waiting if one.output_index == index]
        self._waiting = [one for one in self._waiting if one.output_index != index]
        return taken

    def is_stuck(self, limits: SlotLimits, *, has_ended: bool) -> bool:
        """Whether its reader must be let go: it takes nothing for too long, or too much waits for it meanwhile."""
        if not self.progress.is_stalled or (not self._waiting and not has_ended):
            return False
        too_long = self.progress.stalled_s >= limits.stall_timeout_s
        return too_long or len(self._waiting) > limits.max_deltas or self._waiting_bytes > limits.max_bytes
