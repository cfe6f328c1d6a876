"""What one generation has told, for a reader that comes back: the last deltas, bounded by number and bytes. Pure."""

from collections import deque
from collections.abc import Sequence

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.messages.messages import Text

TOKEN_BYTES = 64  # what a token record weighs at most, without its log probabilities


class History:
    """Deltas by sequence number. An output's end that came without text lies behind the delta before it."""

    def __init__(self, max_deltas: int, max_bytes: int, after_seq: int = 0) -> None:
        """`after_seq`: deltas up to this one were told elsewhere."""
        self._max_deltas = max_deltas
        self._max_bytes = max_bytes
        self._told: deque[tuple[int, Sequence[Text], int]] = deque()  # sequence number, messages, bytes
        self._num_bytes = 0
        self._ends: list[tuple[int, Sequence[Text]]] = []  # last messages of outputs, whose deltas are gone
        self._evicted_seq = after_seq  # of the last delta that is gone
        self.last_seq = after_seq

    def add(self, seq: int, texts: Sequence[Text]) -> None:
        """`texts`, of one output, were told as the delta `seq`, or behind it."""
        size = sum([num_bytes(one) for one in texts])
        self._told.append((seq, texts, size))
        self._num_bytes += size
        self.last_seq = seq
        while len(self._told) > 1 and (len(self._told) > self._max_deltas or self._num_bytes > self._max_bytes):
            self._evicted_seq, gone, size = self._told.popleft()
            self._num_bytes -= size
            if gone[-1].finish is not None:
                self._ends.append((self._evicted_seq, gone[-1:]))

    def since(self, after_seq: int) -> list[tuple[int, Sequence[Text]]]:
        """What a reader lacks that has all up to the delta `after_seq`. Ends that lay behind that are told again.

        Raises ServiceError RESUME_WINDOW_EXPIRED, and INVALID_ARGUMENT for a delta that was not told yet.
        """
        if after_seq > self.last_seq:
            raise invalid("resume.after_seq", f"{after_seq} was not told yet; {self.last_seq} is the last")
        if after_seq < self._evicted_seq:
            raise _evicted(after_seq, self._evicted_seq + 1)
        told = [*self._ends, *((seq, texts) for seq, texts, _ in self._told)]
        return [(seq, texts) for seq, texts in told if seq >= after_seq]


def num_bytes(text: Text) -> int:
    """What it weighs at most while it waits."""
    return len(text.text) + len(text.reasoning) + TOKEN_BYTES * len(text.tokens)


def _evicted(after_seq: int, oldest_seq: int) -> ServiceError:
    return ServiceError(
        Code.OUT_OF_RANGE,
        "RESUME_WINDOW_EXPIRED",
        f"delta {after_seq + 1} is no longer kept; the oldest is {oldest_seq}: start the generation again",
        details={"oldest_seq": str(oldest_seq)},
    )
