"""Changes of single logits before sampling: masks, bars, biases, penalties. Sparse, in place, for all rows at once.

The torch twin of the adjusting kernel, oracle and fallback. Takes flat lists; a pair appears once in a list, but for
bars. Knows no request.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Mask(NamedTuple):
    """Rows that may have some ids only.

    Attributes:
        rows: int64 [M], ascending, each once.
        bits: int32 [M, ceil(V / 32)]: bit b of word w says whether id 32 w + b stays.
    """

    rows: Tensor
    bits: Tensor


class Bars(NamedTuple):
    """Pairs of a row and an id that it may not have. Both int64 [N]."""

    rows: Tensor
    ids: Tensor


class Biases(NamedTuple):
    """What is added to single logits. rows, ids int64 [N], values float32 [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


class Penalties(NamedTuple):
    """How much less likely rows make the ids that they have.

    Attributes:
        rows: int64 [P], each once.
        sizes: int64 [P], how many of the N ids are of the row; in order.
        ids: int64 [N].
        counts: float32 [N], occurrences in the output.
        repetition, presence, frequency: float32 [P]; 1, 0 and 0 change nothing.
    """

    rows: Tensor
    sizes: Tensor
    ids: Tensor
    counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class Changes(NamedTuple):
    """All that is changed in one step's logits, in this order."""

    masks: tuple[Mask, ...] = ()
    bars: Bars | None = None
    biases: Biases | None = None
    penalties: Penalties | None = None


def adjust_(logits: Tensor, changes: Changes, by: ModuleType | None = None) -> None:
    """Change logits float32 [R, V] in place; `by` has the functions below for another device. Barred logits are -inf,
    and stay so."""
    mask, bar, bias, penalise = (mask_, bar_, bias_, penalise_) if by is None else _kernels(by)
    for rows, bits in changes.masks:
        if len(rows):
            mask(logits, rows, bits)
    if changes.bars is not None:
        bar(logits, *changes.bars)
    if changes.biases is not None:
        bias(logits, *changes.biases)
    if changes.penalties is not None:
        rows, sizes, ids, counts, *strengths = changes.penalties
        each = [one.repeat_interleave(sizes) for one in (rows, *strengths)]
        penalise(logits, each[0], ids, counts, *each[1:])


def _kernels(by: ModuleType) -> tuple[Callable[..., None], ...]:
    return by.mask_, by.bar_, by.bias_, by.penalise_


def penalise_(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Make ids that a sequence has less likely, in place.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative logits of ids in prompt or output;
    frequency is taken off once for each occurrence in the output, presence once if there is any.

    Args:
        logits: float32 [R, V].
        rows, ids: int64 [N], the pairs.
        counts: float32 [N], occurrences in the output.
        repetition, presence, frequency: float32 [N], of each pair's row; 1, 0 and 0 change nothing.
    """
    found = logits[rows, ids]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= frequency * counts + presence * (counts > 0)
    logits[rows, ids] = found


def bias_(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits [R, V] += values [N] at the pairs, in place."""
    logits[rows, ids] += values


def mask_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Bar the ids of `rows` whose bit is not set, in place; see `Mask`."""
    unset = _unpacked(bits, logits.shape[1]) == 0
    if len(rows) == len(logits):
        logits.masked_fill_(unset, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(unset, -torch.inf)


def bar_(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Bar the ids of the pairs [N], in place; a pair may appear more than once."""
    logits[rows, ids] = -torch.inf


def _unpacked(bits: Tensor, num: int) -> Tensor:
    """The first `num` bits of rows [M, W] of words, one by one: uint8 [M, num]."""
    if bits.device.type == "cpu":
        # numpy has this as one loop: 10 us against 220 us for 3 x 4,096
        return torch.from_numpy(np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=num, bitorder="little"))
    at = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return bits.view(torch.uint8)[:, :, None].bitwise_right_shift(at).bitwise_and_(1).flatten(1)[:, :num]
