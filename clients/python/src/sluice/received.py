"""The token ids that a client has received, by output, with which another gateway can go on. Pure.

Deltas are recorded as they come and unpacked in batches: unpacking many at once is several times faster than unpacking
each between two messages of a stream, when the processor's caches hold other data.
"""

from collections import defaultdict
from collections.abc import Mapping

from sluice.v1 import types_pb2

BATCH = 64


class Received:
    """The token ids of the deltas recorded so far."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._ids: defaultdict[int, list[int]] = defaultdict(list)
        self._packed: list[types_pb2.Delta] = []

    def note(self, delta: types_pb2.Delta) -> None:
        """Records a delta that was not received before."""
        self._packed.append(delta)
        if len(self._packed) >= BATCH:
            self._unpack()

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all outputs, with ids or without."""
        self._unpack()
        return self._num_tokens

    @property
    def ids(self) -> Mapping[int, list[int]]:
        """Token ids by output; fewer than tokens if token_records is false."""
        self._unpack()
        return self._ids

    @property
    def has_all_ids(self) -> bool:
        """Whether each token came with its id."""
        return sum(map(len, self.ids.values())) == self._num_tokens

    def _unpack(self) -> None:
        for delta in self._packed:
            self._num_tokens += delta.consumed
            tokens = delta.tokens[:]  # a list: iterating over protobuf's container raises an exception at its end
            if tokens:
                ids = self._ids[delta.output_index]
                for token in tokens:
                    ids.append(token.id)
        self._packed.clear()
