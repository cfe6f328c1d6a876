"""Types of `kernels.ops.choose`: the rows to score, and the tokens and log probabilities that it returns.

Tensors only; independent of requests.
"""

import dataclasses
import functools
from typing import NamedTuple

from torch import Tensor

from sluice_server.kernels.reference.scores import ScoreRequest, Scores, addresses


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """Rows that are scored, step after step. All tensors but those of `score_buffer` are int64 and contiguous.

    Attributes:
        at: [L], ascending, each once.
        nums, rows, others, width: what is scored of these L rows; see `kernels.reference.scores.ScoreRequest`.
        room: buffer for the scores, on the host. Implementations may write there; its content is valid until the next
            step.
    """

    at: Tensor
    nums: Tensor
    rows: Tensor
    others: Tensor
    width: int
    score_buffer: Scores

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses and sizes for the CPU kernels: the rows, what is scored, and the buffer."""
        asked = ScoreRequest(self.at, self.nums, self.rows, self.others, self.width)
        return (self.at.data_ptr(), len(self.at), *addresses(asked, self.score_buffer))


class ChosenTokens(NamedTuple):
    """The tokens drawn for a step's rows, and the scores of some.

    Attributes:
        ids: int64 [R], -1 for rows without a usable number.
        scores: scores of the wanted rows, under their unadjusted logits; undefined for a row without an id.
    """

    ids: Tensor
    scores: Scores | None
