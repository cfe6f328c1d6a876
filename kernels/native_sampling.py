"""Our own sampler for CPUs (kernels/cpu/sampling.cpp), as functions of tensors: float32 logits, row by row,
rows shared out to the threads of the other kernels.

Built with these, see `kernels.native`; where there is none the torch twins serve.
"""

import torch
from torch import Tensor

from kernels import native
from kernels.adjust import NO_CHANGES, Changes
from kernels.choice import Chosen, Wanted
from kernels.sampling import Rows
from kernels.scores import Asked, Scores, room

MODULE = native.MODULE
MAX_MASKS = 2  # as in kernels/cpu/adjust.h
NO_MASK, NO_BARS, NO_BIASES, NO_PENALTIES = (0,) * 4, (0,) * 3, (0,) * 4, (0,) * 9  # addresses and sizes
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
    """Ids int64 [R], -1 for rows of no usable number; see `kernels.sampling.sample`."""
    return choose(logits, rows, NO_CHANGES, None).ids


def choose(logits: Tensor, rows: Rows, changes: Changes, wanted: Wanted | None) -> Chosen:
    """See `kernels.ops.choose`; all tensors but those of `rows` contiguous."""
    assert MODULE is not None
    ids = torch.empty(len(logits), dtype=torch.int64)
    columns = [column.contiguous() for column in rows]
    scores = None if wanted is None else wanted.room
    MODULE.choose(
        logits.data_ptr(),
        *logits.shape,
        *[column.data_ptr() for column in columns],
        ids.data_ptr(),
        *_addresses(changes),
        *(NOT_WANTED if wanted is None or scores is None else (*_list(wanted.at), *_scoring(wanted, scores))),
    )
    return Chosen(ids, scores)


def score(logits: Tensor, asked: Asked) -> Scores:
    """See `kernels.scores.score`."""
    assert MODULE is not None
    scores = room(len(logits), asked.width, len(asked.rows))
    MODULE.score(logits.data_ptr(), *logits.shape, asked.ids.data_ptr(), *_scoring(asked, scores))
    return scores


def _scoring(asked: Asked | Wanted, scores: Scores) -> tuple[int, ...]:
    pairs = (*_list(asked.rows), asked.others.data_ptr())
    found = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    others = (scores.other_logprobs, scores.other_ranks)
    return (asked.nums.data_ptr(), asked.width, *pairs, *[one.data_ptr() for one in (*found, *others)])


def _list(rows: Tensor) -> tuple[int, int]:
    return rows.data_ptr(), len(rows)


def _addresses(changes: Changes) -> list[int]:
    assert len(changes.masks) <= MAX_MASKS
    found: list[int] = []
    for rows, bits in changes.masks:
        found += (*_list(rows), bits.data_ptr(), bits.shape[1])
    found += NO_MASK * (MAX_MASKS - len(changes.masks))
    for some, nothing in (
        (changes.bars, NO_BARS),
        (changes.biases, NO_BIASES),
        (changes.penalties, NO_PENALTIES),
    ):
        found += nothing if some is None else (*_list(some[0]), *[one.data_ptr() for one in some[1:]])
    return found
