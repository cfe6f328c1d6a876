"""Changes single logits before sampling: token masks, banned tokens, biases, penalties. Sparse, in place, for all rows.

This is the reference implementation and the fallback of the adjusting kernels. Takes flat lists; a pair (row, id)
appears at most once in a list, except in banned tokens. Pure tensor operations, independent of requests.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_MASKS = 2  # as in kernels/cpu/adjust.h
NO_MASK, NO_BANNED_TOKENS, NO_BIASES, NO_PENALTIES = (0,) * 4, (0,) * 3, (0,) * 4, (0,) * 9  # addresses and sizes


class TokenMask(NamedTuple):
    """Rows that may only sample some ids.

    Attributes:
        rows: int64 [M], ascending, each once.
        bits: int32 [M, ceil(V / 32)]: bit b of word w says whether id 32 w + b is allowed.
    """

    rows: Tensor
    bits: Tensor

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """The rows' address, their number, the bits' address and the words of a row, for the CPU kernels."""
        return (self.rows.data_ptr(), len(self.rows), self.bits.data_ptr(), self.bits.shape[1])


class BannedTokens(NamedTuple):
    """Pairs of a row and an id that the row may not sample. rows, ids int64 [N]."""

    rows: Tensor
    ids: Tensor


class LogitBiases(NamedTuple):
    """Numbers that are added to single logits. rows, ids int64 [N], values float32 [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


class Penalties(NamedTuple):
    """Penalties of rows on the ids that occur in their prompt or output.

    Attributes:
        rows: int64 [P], ascending, each once.
        firsts, sizes: int64 [P], where each row's ids begin among the N ids, and how many they are. On a device they
            follow each other without gaps.
        ids: int64 [N].
        counts: float32 [N], occurrences in the output.
        repetition, presence, frequency: float32 [P], strengths of the penalties; 1, 0 and 0 change nothing.
    """

    rows: Tensor
    firsts: Tensor
    sizes: Tensor
    ids: Tensor
    counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclasses.dataclass(frozen=True)
class LogitAdjustments:
    """All changes to one step's logits, in the order in which they are applied.

    There are two masks at most. The rows of each list ascend. One object may serve many steps; the contents of its
    tensors may change in between.
    """

    masks: tuple[TokenMask, ...] = ()
    banned_tokens: BannedTokens | None = None
    biases: LogitBiases | None = None
    penalties: Penalties | None = None

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses and sizes for the CPU kernels: for each list its rows, their number, and its other columns."""
        assert len(self.masks) <= MAX_MASKS
        found: list[int] = []
        for mask in self.masks:
            found += mask.addresses
        found += NO_MASK * (MAX_MASKS - len(self.masks))
        lists = ((self.banned_tokens, NO_BANNED_TOKENS), (self.biases, NO_BIASES), (self.penalties, NO_PENALTIES))
        for some, nothing in lists:
            found += nothing if some is None else (some[0].data_ptr(), len(some[0]), *map(Tensor.data_ptr, some[1:]))
        return tuple(found)


NO_CHANGES = LogitAdjustments()


def adjust_(logits: Tensor, changes: LogitAdjustments) -> None:
    """Changes logits float32 [R, V] in place. Logits of masked and banned ids become -inf and stay so."""
    for mask in changes.masks:
        _mask(logits, mask)
    if changes.banned_tokens is not None:
        logits[changes.banned_tokens.rows, changes.banned_tokens.ids] = -torch.inf
    if changes.biases is not None:
        logits[changes.biases.rows, changes.biases.ids] += changes.biases.values
    if changes.penalties is not None:
        _penalise(logits, changes.penalties)


def _penalise(logits: Tensor, found: Penalties) -> None:
    """Applies the penalties in place.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative logits of ids in prompt or output.
    Frequency is subtracted once for each occurrence in the output, presence once if there is any.
    """
    rows, repetition, presence, frequency = (
        one.repeat_interleave(found.sizes) for one in (found.rows, found.repetition, found.presence, found.frequency)
    )
    spans = zip(found.firsts.tolist(), found.sizes.tolist(), strict=True)
    at = torch.cat([torch.arange(first, first + size, device=logits.device) for first, size in spans])
    ids, counts = found.ids[at], found.counts[at]
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    logits[rows, ids] = values


def _mask(logits: Tensor, mask: TokenMask) -> None:
    unset = _unpacked(mask.bits, logits.shape[1]) == 0
    if len(mask.rows) == len(logits):
        logits.masked_fill_(unset, -torch.inf)
    else:
        logits[mask.rows] = logits[mask.rows].masked_fill_(unset, -torch.inf)


def _unpacked(bits: Tensor, num: int) -> Tensor:
    """Returns the first `num` bits of rows [M, W] of words as single numbers: uint8 [M, num]."""
    if bits.device.type == "cpu":
        # numpy does this in one loop: 10 us against 220 us for 3 x 4,096
        return torch.from_numpy(np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=num, bitorder="little"))
    at = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return bits.view(torch.uint8)[:, :, None].bitwise_right_shift(at).bitwise_and_(1).flatten(1)[:, :num]
