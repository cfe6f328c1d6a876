"""Who reads a stream, as its server sees them: whether a write stands still, and for how long. Pure: time is told.

A stream of one generation has a reader of its own; the generations of one Converse stream share theirs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SlotLimits:
    """What may wait unsent for one slow reader, and for how long."""

    stall_timeout_s: float
    max_deltas: int
    max_bytes: int


class WriteProgress:
    """The writes to one stream. One slow write alone does not count: what counts is that it is the same one."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.is_writing = False
        self.is_stalled = False  # the write that was under way at the last look still is
        self.stalled_s = 0.0
        self._watched_write = 0

    def begin_write(self) -> None:
        """The handler waits for the transport from here on."""
        self.num_writes += 1
        self.is_writing = True

    def end_write(self) -> None:
        """The transport took it."""
        self.is_writing = False

    def watch(self, elapsed_s: float) -> None:
        """Look again, `elapsed_s` after the last time."""
        self.is_stalled = self.is_writing and self.num_writes == self._watched_write
        self.stalled_s = self.stalled_s + elapsed_s if self.is_stalled else 0.0
        self._watched_write = self.num_writes
