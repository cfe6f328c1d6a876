"""Calls the C++ sampler (kernels/cpu/sampling.cpp) with tensors: float32 logits, row by row.

Rows are distributed over the threads of the other C++ kernels. It is built with them, see `kernels.cpu.builds`; without
a build, the reference implementations serve.
"""

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds
from sluice_server.kernels.reference.adjust import NO_CHANGES, LogitAdjustments
from sluice_server.kernels.reference.choice import ChosenTokens, ScoredRows
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.reference.scores import ScoreRequest, Scores, addresses, score_buffer

MODULE = builds.MODULE
NOT_WANTED = (0,) * 13


def takes(logits: Tensor) -> bool:
    """Returns whether logits [R, V] can be processed here."""
    return (
        MODULE is not None
        and logits.dtype is torch.float32
        and logits.device.type == "cpu"
        and logits.is_contiguous()
        and logits.shape[1] > 0
    )


def sample(logits: Tensor, rows: Rows) -> Tensor:
    """Draws ids int64 [R], -1 for rows without a usable number; see `kernels.reference.sampling.sample`."""
    return choose(logits, rows, NO_CHANGES, None).ids


def choose(logits: Tensor, rows: Rows, changes: LogitAdjustments, wanted: ScoredRows | None) -> ChosenTokens:
    """Adjusts logits, draws tokens and scores rows; see `kernels.ops.choose`. All tensors except `rows` are
    contiguous."""
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
    return ChosenTokens(ids, None if wanted is None else wanted.score_buffer)


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """Returns log probabilities and ranks; see `kernels.reference.scores.score`."""
    assert MODULE is not None
    scores = score_buffer(len(logits), asked.width, len(asked.rows))
    MODULE.score(logits.data_ptr(), *logits.shape, asked.ids.data_ptr(), *addresses(asked, scores))
    return scores
