"""Describes a step's rows for attention on a device: ragged queries, contexts and block tables.

Bounds that choose grids and schedules are plain numbers on the host, so that no launch waits for the device. Takes and
returns tensors; depends on no request or plan.
"""

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Longs: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Tables: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int32]]"
MAX_TREE = 64  # tokens of a draft tree at most: bits of a mask


@dataclasses.dataclass(frozen=True)
class SharedPrefixRows:
    """Prefixes that neighbouring rows of one token each share. Attention reads each prefix once for all its rows.

    Attributes:
        starts: int32 [groups + 1], first token of each group, which may be empty. Rows after the last group are in
            none.
        lengths: int32 [groups], number of keys of each group's prefix, in whole blocks.
        tables: int32 [groups, width], blocks of the prefixes.
        prefixes: int32 [rows], the same lengths by row; 0 for a row in no group.
        max_rows, max_length: upper bounds of a group's rows and of the lengths.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    prefixes: Tensor
    max_rows: int
    max_length: int


@dataclasses.dataclass(frozen=True)
class Ragged:
    """The rows of a step, as GPU kernels read them.

    Attributes:
        starts: int32 [rows + 1], first token of each row; the last entry is T.
        contexts: int32 [rows], number of keys of each row, this step's included.
        tables: int32 [rows, width], with contiguous rows.
        num_tokens, num_rows: T and number of rows; the tensors may be longer, and their rest is ignored.
        has_singles: whether rows may have a single token.
        max_query: upper bound of a row's tokens.
        max_context: upper bound of a row's keys.
        tree: int64 [T]: bit j says whether a token sees token j of its own row in this step (itself included); None if
            every token sees all tokens up to itself. Rows of a tree have `MAX_TREE` tokens at most.
        shared: prefixes that rows share; None if there are none.
        ends: int32 [T], where the keys end that a token sees; None if every token sees all tokens up to itself.
        plans: what kernels derive from the rows once for all layers, by what it depends on.
    """

    starts: Tensor
    contexts: Tensor
    tables: Tensor
    num_tokens: int
    num_rows: int
    has_singles: bool
    max_query: int
    max_context: int
    tree: Tensor | None = None
    shared: SharedPrefixRows | None = None
    ends: Tensor | None = None
    plans: dict[object, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)

    @classmethod
    def of(cls, counts: Longs, contexts: Longs, tables: Tables, device: torch.device) -> "Ragged":
        """Builds the description of rows with `counts` tokens in this step; rows of one token come first."""
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        return cls(
            starts=torch.from_numpy(starts).to(device),
            contexts=torch.from_numpy(contexts.astype(np.int32)).to(device),
            tables=torch.from_numpy(tables).to(device),
            num_tokens=int(starts[-1]),
            num_rows=len(counts),
            has_singles=bool((counts == 1).any()),
            max_query=int(counts.max()),
            max_context=int(contexts.max()),
        )


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer's attention, beyond its shapes.

    Attributes:
        scale: factor of the scores.
        window: number of keys visible to a query, itself included; None for all.
        cap: scores become cap · tanh(score / cap); 0 leaves them as they are.
        sinks: float32 [heads], score of a key without a value for each head; None for none.
        is_batch_invariant: a query's bits depend on its own sequence alone; this is slower.
    """

    scale: float
    window: int | None = None
    cap: float = 0.0
    sinks: Tensor | None = None
    is_batch_invariant: bool = False
