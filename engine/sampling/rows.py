"""Sampling parameters of the rows of one step, as arrays: the input of the sampler."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

Floats: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
Ints: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Words: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"
Bits: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int32]]"


@dataclasses.dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The penalties of the rows that have any; see `kernels.reference.adjust.Penalties`.

    The same object is used again while only sizes and counts change; these change in place.
    """

    rows: Ints
    firsts: Ints
    sizes: Ints
    ids: Ints
    counts: Floats
    repetition: Floats
    presence: Floats
    frequency: Floats


@dataclasses.dataclass(frozen=True, slots=True)
class LogitBiasRows:
    """Values added to single logits: row, id and value, all [N]; rows ascending."""

    rows: Ints
    ids: Ints
    values: Floats


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPairs:
    """(row, id) pairs, rows ascending. Both [N]."""

    rows: Ints
    ids: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that request log probabilities.

    Attributes:
        rows: int64 [L], ascending.
        nums: int64 [L], number of most likely ids to report (0: the sampled token only).
        ids: by index in `rows`, further ids to report, where any are requested.
    """

    rows: Ints
    nums: Ints
    ids: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class AllowedTokenRows:
    """Rows that may sample certain ids only.

    Attributes:
        rows: int64 [M], ascending.
        bits: int32 [M, ceil(V / 32)]: bit b of word w says whether id 32 w + b may be sampled.
    """

    rows: Ints
    bits: Bits


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarMasks(AllowedTokenRows):
    """The tokens that grammars allow.

    Attributes:
        lost: rows whose grammar cannot be followed any further, in `rows` or not.
        no_end: int32 [ceil(V / 32)], every bit except those of the end-of-sequence ids.
    """

    lost: frozenset[int]
    no_end: Words

    @property
    def ends(self) -> frozenset[int]:
        """The rows whose grammar is complete: only an end of the sequence may follow."""
        at_end = ~(self.bits & self.no_end).any(axis=1)
        return frozenset(self.rows[at_end].tolist())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SamplingParamRows:
    """Parameters of R rows, unchanged as long as the same sequences sample.

    Attributes:
        temperature: float32 [R], 0 is greedy.
        top_k: int64 [R], 0 keeps all.
        top_p, min_p: float32 [R].
        typical_p: float32 [R], 1 keeps all.
        seed: int64 [R], two's complement of the unsigned seed.
        output: int64 [R], index of the output within its request.
        biases: of the rows that have any; None if none has.
        allowed: the only ids that may be sampled, of the rows with such a restriction.
        logprobs: the rows that request log probabilities.
    """

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    seed: Ints
    output: Ints
    biases: LogitBiasRows | None = None
    allowed: AllowedTokenRows | None = None
    logprobs: LogprobRows | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingRows:
    """Everything that R rows are sampled with.

    Attributes:
        param_rows: the same object as long as they stay, so that their tensors are made once.
        position: int64 [R], of the token to be sampled.
        penalties: of the rows that have any; None if none has.
        banned: ids that may not be sampled, of the rows that have any.
        masks: of the rows that follow a grammar; None if none does.
    """

    param_rows: SamplingParamRows
    position: Ints
    penalties: PenaltyRows | None = None
    banned: TokenPairs | None = None
    masks: GrammarMasks | None = None

    @property
    def is_adjusted(self) -> bool:
        """Whether any logit is changed before sampling."""
        return bool(self.banned or self.param_rows.allowed or self.penalties or self.param_rows.biases or self.masks)


def allow(found: Sequence[tuple[int, Bits]]) -> AllowedTokenRows | None:
    """Returns rows, ascending, with the bits that they allow, [1, W] each; None if there are none."""
    if not found:
        return None
    return AllowedTokenRows(
        np.array([row for row, _ in found], dtype=np.int64), np.concatenate([bits for _, bits in found])
    )


def bits_of(ids: Sequence[int], vocab_size: int) -> Bits:
    """Returns the bits of these ids, int32 [1, W]."""
    flags = np.zeros((1, -(-vocab_size // 32) * 32), dtype=np.uint8)
    flags[0, list(ids)] = 1
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def join(found: Sequence[tuple[int, Ints]]) -> TokenPairs | None:
    """Returns the ids of rows as pairs; a row may occur repeatedly. None if there are none."""
    if not found:
        return None
    found = sorted(found, key=_row_of)
    sizes = [len(ids) for _, ids in found]
    rows: Ints = np.repeat(np.array([row for row, _ in found], dtype=np.int64), sizes)
    return TokenPairs(rows, np.concatenate([ids for _, ids in found]))


_row_of: Callable[[tuple[int, Ints]], int] = operator.itemgetter(0)
