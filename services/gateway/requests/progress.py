"""Tracks whether a write to a stream is stalled, and for how long. Pure: elapsed time is passed in.

A stream of one generation has a `WriteProgress` of its own; the generations of a Converse stream share one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SlotLimits:
    """Limits on what may wait for one slow reader: seconds, deltas, bytes."""

    stall_timeout_s: float
    max_deltas: int
    max_bytes: int


class WriteProgress:
    """The writes to one stream. It is stalled when the same write is still under way at the next `watch`."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.is_writing = False
        self.is_stalled = False  # the write of the previous `watch` is still under way
        self.stalled_s = 0.0
        self._watched_write = 0

    def begin_write(self) -> None:
        """Marks that the handler waits for the transport from now on."""
        self.num_writes += 1
        self.is_writing = True

    def end_write(self) -> None:
        """Marks that the transport has taken the write."""
        self.is_writing = False

    def watch(self, elapsed_s: float) -> None:
        """Updates `is_stalled` and `stalled_s`; called `elapsed_s` after the previous call."""
        self.is_stalled = self.is_writing and self.num_writes == self._watched_write
        self.stalled_s = self.stalled_s + elapsed_s if self.is_stalled else 0.0
        self._watched_write = self.num_writes
