"""A step's rows as attention on a device sees them: ragged queries, contexts and block tables.

Bounds that choose grids and schedules are plain numbers, so that nothing is waited for. Takes and gives tensors; knows
no request and no plan.
"""

import dataclasses
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Longs: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Tables: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int32]]"
MAX_TREE = 64  # nodes of a tree of drafts: bits of its masks


@dataclasses.dataclass(frozen=True)
class SharedPrefixRows:
    """Prefixes that neighbouring rows of one token each share: looked at once for all of them.

    Attributes:
        starts: int32 [groups + 1], a group's first token: it may have none. Rows behind the last group are in none.
        lengths: int32 [groups], keys of its prefix, whole blocks.
        tables: int32 [groups, width], blocks of the prefixes.
        prefixes: int32 [rows], the same lengths by row; 0 for a row in no group.
        max_rows, max_length: bounds of a group's rows and of the lengths.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    prefixes: Tensor
    max_rows: int
    max_length: int


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Attributes:
    starts: int32 [rows + 1], a row's first token; the last is T.
    contexts: int32 [rows], keys of each row, this step's included.
    tables: int32 [rows, width], contiguous rows.
    num_tokens, num_rows: T and rows; on a device there may be more of either, which nobody looks at.
    num_singles: leading rows of one token.
    max_query: tokens of a row at most.
    max_context: keys of a row at most.
    tree: int64 [T]: bit j tells whether a token sees token j of its own row in this step (itself included); None for
        all up to itself. Rows of a tree have `MAX_TREE` tokens at most.
    shared: prefixes that rows share; None for none.
    """

    starts: Tensor
    contexts: Tensor
    tables: Tensor
    num_tokens: int
    num_rows: int
    num_singles: int
    max_query: int
    max_context: int
    tree: Tensor | None = None
    shared: SharedPrefixRows | None = None

    @classmethod
    def of(cls, counts: Longs, contexts: Longs, tables: Tables, device: torch.device) -> "Ragged":
        """Of rows with `counts` tokens in this step, those with one first."""
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        return cls(
            starts=torch.from_numpy(starts).to(device),
            contexts=torch.from_numpy(contexts.astype(np.int32)).to(device),
            tables=torch.from_numpy(tables).to(device),
            num_tokens=int(starts[-1]),
            num_rows=len(counts),
            num_singles=int((counts == 1).sum()),
            max_query=int(counts.max()),
            max_context=int(contexts.max()),
        )


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What a layer's attention is, beyond its shapes.

    Attributes:
        scale: of the scores.
        window: keys visible to a query, itself included; None for all.
        cap: scores become cap · tanh(score / cap); 0 for as they are.
        sinks: float32 [heads], scores of a key without a value; None for none.
        is_batch_invariant: a query's bits are a function of its own sequence alone; costs speed.
    """

    scale: float
    window: int | None = None
    cap: float = 0.0
    sinks: Tensor | None = None
    is_batch_invariant: bool = False
