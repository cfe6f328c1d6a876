"""The latest deltas of one generation, kept for a reader that comes back; bounded by number and bytes. Pure."""

from collections import deque
from collections.abc import Sequence

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.messages.messages import Text

TOKEN_BYTES = 64  # of a token record at most, without its log probabilities


class History:
    """Deltas by sequence number. An output's end without text is kept under the number of the delta before it."""

    def __init__(self, max_deltas: int, max_bytes: int, after_seq: int = 0) -> None:
        """`after_seq`: deltas up to this number were sent by another process and are not here."""
        self._max_deltas = max_deltas
        self._max_bytes = max_bytes
        self._sent: deque[tuple[int, Sequence[Text], int]] = deque()  # sequence number, messages, bytes
        self._num_bytes = 0
        self._ends: list[tuple[int, Sequence[Text]]] = []  # last messages of outputs whose deltas were evicted
        self._evicted_seq = after_seq  # number of the last delta that was evicted
        self.last_seq = after_seq

    def add(self, seq: int, texts: Sequence[Text]) -> None:
        """Adds messages of one output that were sent as the delta `seq`, or as an end without text behind it."""
        size = sum([num_bytes(one) for one in texts])
        self._sent.append((seq, texts, size))
        self._num_bytes += size
        self.last_seq = seq
        while len(self._sent) > 1 and (len(self._sent) > self._max_deltas or self._num_bytes > self._max_bytes):
            self._evicted_seq, gone, size = self._sent.popleft()
            self._num_bytes -= size
            if gone[-1].finish is not None:
                self._ends.append((self._evicted_seq, gone[-1:]))

    def since(self, after_seq: int) -> list[tuple[int, Sequence[Text]]]:
        """Returns what a reader lacks that has all deltas up to `after_seq`. Output ends behind that delta are
        repeated.

        Raises ServiceError RESUME_WINDOW_EXPIRED, and INVALID_ARGUMENT for a delta that has not been sent yet.
        """
        if after_seq > self.last_seq:
            raise invalid("resume.after_seq", f"{after_seq} was not sent yet; {self.last_seq} is the last")
        if after_seq < self._evicted_seq:
            raise _evicted(after_seq, self._evicted_seq + 1)
        sent = [*self._ends, *((seq, texts) for seq, texts, _ in self._sent)]
        return [(seq, texts) for seq, texts in sent if seq >= after_seq]


def num_bytes(text: Text) -> int:
    """Returns the most bytes that a message takes while it waits."""
    size = len(text.text) + len(text.reasoning) + TOKEN_BYTES * len(text.tokens)
    if text.tool_calls or text.tool_call_parts:
        size += sum([TOKEN_BYTES + len(one.name) + len(one.arguments) for one in text.tool_calls])
        size += sum([TOKEN_BYTES + len(one.name) + len(one.arguments) for one in text.tool_call_parts])
    return size


def _evicted(after_seq: int, oldest_seq: int) -> ServiceError:
    return ServiceError(
        Code.OUT_OF_RANGE,
        "RESUME_WINDOW_EXPIRED",
        f"delta {after_seq + 1} is no longer kept; the oldest is {oldest_seq}: start the generation again",
        details={"oldest_seq": str(oldest_seq)},
    )
