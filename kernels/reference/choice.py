"""What a step wants of its logits, and what it gets: a token for each row, log probabilities of the rows that ask.

See `kernels.ops.choose`. Knows no request.
"""

import dataclasses
import functools
from typing import NamedTuple

from torch import Tensor

from sluice_server.kernels.reference.scores import ScoreRequest, Scores, addresses


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """Rows that are scored, step after step. All tensors but those of the room int64 and contiguous.

    Attributes:
        at: [L], ascending, each once.
        nums, rows, others, width: of these L rows; see `kernels.reference.scores.ScoreRequest`.
        room: for scores, on the host: they may be put there, and hold until the next step's.
    """

    at: Tensor
    nums: Tensor
    rows: Tensor
    others: Tensor
    width: int
    room: Scores

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """For kernels on CPU: the rows, what is asked for, and the room."""
        asked = ScoreRequest(self.at, self.nums, self.rows, self.others, self.width)
        return (self.at.data_ptr(), len(self.at), *addresses(asked, self.room))


class ChosenTokens(NamedTuple):
    """Attributes:
    ids: int64 [R], -1 for rows of no usable number.
    scores: of the wanted rows, under their logits as they came; of a row without an id they mean nothing.
    """

    ids: Tensor
    scores: Scores | None
