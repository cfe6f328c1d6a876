"""Embeddings and logits, of a vocabulary that a rank has alone or shares out with others: each has some ids' rows."""

from typing import Protocol

from torch import Tensor

from sluice_server.engine.parallel.joined import joined
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.sums import RankSums
from sluice_server.kernels import ops


class Vocabulary(Protocol):
    """The ids whose rows of embeddings and head a rank has."""

    @property
    def num_rows(self) -> int:
        """The number of these ids."""

    @property
    def num_logits(self) -> int:
        """The number of logits that `gathered` returns for a row."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Returns the rows [T, H] of ids int64 [T] in `table` [rows, H]; zeros for ids that other ranks have."""

    def joined(self, embeddings: Tensor) -> Tensor:
        """Returns float32 embeddings [T, H] with those of the other ranks."""

    def gathered(self, logits: Tensor) -> Tensor:
        """Returns logits [R, rows] with those of the other ranks on rank 0: [R, vocabulary]; others have theirs."""


class WholeVocabulary:
    """All ids."""

    def __init__(self, size: int) -> None:
        self.num_rows = self.num_logits = size

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Implements `Vocabulary.embedding`."""
        return ops.embedding(ids, table)

    def joined(self, embeddings: Tensor) -> Tensor:
        """Implements `Vocabulary.joined`."""
        return embeddings

    def gathered(self, logits: Tensor) -> Tensor:
        """Implements `Vocabulary.gathered`."""
        return logits


class SharedVocabulary:
    """The ids of one rank among several."""

    def __init__(self, ids: range, size: int, sums: RankSums) -> None:
        """Has `ids` of a vocabulary of `size`."""
        self.num_rows = len(ids)
        self.num_logits = len(ids) if sums.rank else size
        self._first, self._size = ids.start, size
        self._sums = sums

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Implements `Vocabulary.embedding`."""
        at = ids - self._first
        is_other = (at < 0) | (at >= self.num_rows)
        return ops.embedding(at.masked_fill(is_other, 0), table).masked_fill_(is_other[:, None], 0.0)

    def joined(self, embeddings: Tensor) -> Tensor:
        """Implements `Vocabulary.joined`."""
        return joined(embeddings, self._sums)

    def gathered(self, logits: Tensor) -> Tensor:
        """Implements `Vocabulary.gathered`."""
        whole = self._sums.gather(logits, self._size)
        return logits if whole is None else whole


def vocabulary_of(size: int, ranks: Ranks | None) -> Vocabulary:
    """Returns the ids that a rank has of a vocabulary of `size`; all of them without other ranks."""
    if ranks is None or ranks.shape.tensor_size == 1:
        return WholeVocabulary(size)
    return SharedVocabulary(ranks.shape.vocabulary(size), size, ranks.sums)
