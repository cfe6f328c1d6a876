"""Our own sampler for CPUs (kernels/cpu/sampling.cpp), as functions of tensors: float32 logits, row by row.

Built as the other kernels, see `kernels.native`; where there is none the torch twins serve.
"""

import torch
from torch import Tensor

from kernels.adjust import Changes
from kernels.native import load, runnable
from kernels.sampling import Rows
from kernels.scores import Asked, Scores

MODULE = next(filter(None, (load(f"sampling_{name}") for name in runnable())), None)


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
    assert MODULE is not None
    ids = torch.empty(len(logits), dtype=torch.int64)
    columns = [column.contiguous() for column in rows]
    MODULE.sample(
        logits.data_ptr(),
        len(logits),
        logits.shape[1],
        *(column.data_ptr() for column in columns),
        ids.data_ptr(),
    )
    return ids


def score(logits: Tensor, asked: Asked) -> Scores:
    """See `kernels.scores.score`."""
    assert MODULE is not None
    num, pairs, width = len(logits), len(asked.rows), asked.width
    found = Scores(
        torch.empty(num),
        torch.empty(num, dtype=torch.int64),
        torch.empty(num, width, dtype=torch.int64),
        torch.empty(num, width),
        torch.empty(pairs),
        torch.empty(pairs, dtype=torch.int64),
    )
    MODULE.score(
        logits.data_ptr(),
        num,
        logits.shape[1],
        asked.ids.data_ptr(),
        asked.nums.data_ptr(),
        width,
        asked.rows.data_ptr(),
        asked.others.data_ptr(),
        pairs,
        *(one.data_ptr() for one in found),
    )
    return found


def adjust_(logits: Tensor, changes: Changes) -> None:
    """See `kernels.adjust.adjust_`; all tensors contiguous."""
    assert MODULE is not None
    at, vocab = logits.data_ptr(), logits.shape[1]
    for rows, bits in changes.masks:
        MODULE.mask(at, vocab, rows.data_ptr(), bits.data_ptr(), *bits.shape)
    if changes.bars is not None:
        MODULE.bar(at, vocab, *(one.data_ptr() for one in changes.bars), len(changes.bars.rows))
    if changes.biases is not None:
        MODULE.add(at, vocab, *(one.data_ptr() for one in changes.biases), len(changes.biases.rows))
    if changes.penalties is not None:
        MODULE.penalise(at, vocab, *(one.data_ptr() for one in changes.penalties), len(changes.penalties.rows))
