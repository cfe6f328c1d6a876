"""Delivers one request's messages to its reader: queues them, numbers deltas, wakes the reader or breaks it off.

While the reader is busy writing, messages gather here and are sent as one delta; the first message is always a delta of
its own. Pure: no clock and no loop; readers are woken by a callback.
"""

from collections.abc import Callable

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.requests.deltas import MAX_DELTA_BYTES, has_content, taken_of
from sluice_server.services.gateway.requests.history import History, num_bytes
from sluice_server.services.gateway.requests.progress import SlotLimits, WriteProgress
from sluice_server.services.messages.messages import Text


def _nothing() -> None:
    """Does nothing: the stream has no reader to wake."""


def _ignore(error: ServiceError) -> None:
    """Does nothing: the stream has no reader to interrupt."""


class Delivery:
    """The queue of one request's messages for its reader."""

    def __init__(self, *, streams: bool, num_outputs: int = 1, last_seq: int = 0) -> None:
        """`streams`: the reader is woken for every message, not only at the end. `last_seq`: deltas up to this number
        were sent by another process."""
        self.last_seq = last_seq
        self.history: History | None = None  # only of a request that outlives its reader
        self.progress = WriteProgress()
        self.on_news: Callable[[], None] = _nothing
        self.is_broken_off = False  # the reader is being interrupted
        self._interrupt: Callable[[ServiceError], object] = _ignore  # ends the reader's task with the error
        self._streams = streams
        self._has_one_output = num_outputs == 1
        self._waiting: list[Text] = []
        self._waiting_bytes = 0

    def attach(
        self, on_news: Callable[[], None], interrupt: Callable[[ServiceError], object], progress: WriteProgress
    ) -> None:
        """Sets the reader: its wake-up callback, its interrupt callback and its write progress."""
        self.on_news, self._interrupt, self.progress = on_news, interrupt, progress
        self.is_broken_off = False

    def detach(self, on_news: Callable[[], None] = _nothing) -> None:
        """Removes the reader; `on_news` is called in its place."""
        self.attach(on_news, _ignore, WriteProgress())

    def break_off(self, error: ServiceError) -> None:
        """Interrupts the reader with `error`."""
        self.is_broken_off = True
        self._interrupt(error)

    def add(self, text: Text) -> None:
        """Queues a message for the reader."""
        self._waiting.append(text)
        self._waiting_bytes += num_bytes(text)

    def announce(self) -> None:
        """Wakes the reader of a streaming request."""
        if self._streams:
            self.on_news()

    def take(self) -> list[Text]:
        """Takes the messages of one output for the next delta; empty when none waits.

        The first message is taken alone, later ones together up to `MAX_DELTA_BYTES`. The last message of an output may
        hold only its end: then there is no delta, and `last_seq` stays.
        """
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
        """Takes all waiting messages of one output."""
        taken = [one for one in self._waiting if one.output_index == index]
        self._waiting = [one for one in self._waiting if one.output_index != index]
        return taken

    def is_stuck(self, limits: SlotLimits, *, has_ended: bool) -> bool:
        """Whether the reader must be broken off: its write has stalled for too long, or too much has queued up."""
        if not self.progress.is_stalled or (not self._waiting and not has_ended):
            return False
        too_long = self.progress.stalled_s >= limits.stall_timeout_s
        return too_long or len(self._waiting) > limits.max_deltas or self._waiting_bytes > limits.max_bytes
