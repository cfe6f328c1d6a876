"""Our own sampler for CPUs (kernels/cpu/sampling.cpp), as functions of tensors: float32 logits, row by row,
rows shared out to the threads of the other kernels.

Built with these, see `kernels.cpu.builds`; where there is none the torch twins serve.
"""

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds
from sluice_server.kernels.reference.adjust import NO_CHANGES, LogitAdjustments
from sluice_server.kernels.reference.choice import ChosenTokens, ScoredRows
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.reference.scores import ScoreRequest, Scores, addresses, room

MODULE = builds.MODULE
NOT_WANTED = (0,) * 13


def takes(logits: Tensor) -> bool:
    """Whether logits [R, V] may be worked on here."""
    return (
        MODULE is not None
        and logits.dtype is torch.float32
        and logits.device.type == "cpu"
        and logits.is_contiguous()
        and logits.shape[1] > 0
    )


def sample(logits: Tensor, rows: Rows) -> Tensor:
    """Ids int64 [R], -1 for rows of no usable number; see `kernels.reference.sampling.sample`."""
    return choose(logits, rows, NO_CHANGES, None).ids


def choose(logits: Tensor, rows: Rows, changes: LogitAdjustments, wanted: ScoredRows | None) -> ChosenTokens:
    """See `kernels.ops.choose`; all tensors but those of `rows` contiguous."""
    assert MODULE is not None
    ids = torch.empty(len(logits), dtype=torch.int64)
    columns = [column.contiguous() for column in rows]
    MODULE.choose(
        logits.data_ptr(),
        *logits.shape,
        *[column.data_ptr() for column in columns],
        ids.data_ptr(),
        *changes.addresses,
        *(NOT_WANTED if wanted is None else wanted.addresses),
    )
    return ChosenTokens(ids, None if wanted is None else wanted.room)


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """See `kernels.reference.scores.score`."""
    assert MODULE is not None
    scores = room(len(logits), asked.width, len(asked.rows))
    MODULE.score(logits.data_ptr(), *logits.shape, asked.ids.data_ptr(), *addresses(asked, scores))
    return scores
