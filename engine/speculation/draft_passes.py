"""Passes of a drafter over rows of tokens: entries of its cache, and logits behind the last token of each row.

Takes tokens, block tables and numbers, not requests. `ComputedPasses` computes each operation by operation;
`engine.worker.recorded_passes` replays the recordings of a GPU.
"""

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sluice_server.engine.speculation.drafters import Drafter
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import Tables


@dataclasses.dataclass(frozen=True, slots=True)
class DraftPass:
    """One pass: some entries of each row.

    Attributes:
        ids: tokens, row by row.
        nums: entries of each row in this pass.
        contexts: entries that each row then has.
        tables: int32 [rows, blocks], block tables of the rows.
        ends: the rows behind whose last token something is drafted.
        states: [rows, hidden], the drafter's own hidden states before the single token of each row; None where the
            target's are read, and for drafters that read none.
    """

    ids: list[int]
    nums: list[int]
    contexts: list[int]
    tables: Tables
    ends: list[int]
    states: Tensor | None


class EndStates(NamedTuple):
    """What a pass leaves behind its `ends`, in their order: hidden states [ends, hidden], and logits float32 [ends, V],
    which may be overwritten. Both are valid until the next pass."""

    hidden: Tensor
    logits: Tensor


class DraftPasses(Protocol):
    """Computes passes of one drafter over one cache."""

    drafter: Drafter
    block_size: int

    def compute(self, one: DraftPass) -> EndStates | None:
        """Computes a pass and writes its entries. Returns None for a pass without ends."""


class ComputedPasses:
    """Computes passes operation by operation."""

    def __init__(self, drafter: Drafter, cache: list[Tensor], block_size: int) -> None:
        """`cache`: from `Drafter.new_cache`, with as many blocks as the target's."""
        self.drafter = drafter
        self.block_size = block_size
        self._cache = cache

    def compute(self, one: DraftPass) -> EndStates | None:
        """Implements `DraftPasses.compute`."""
        device = self.drafter.device
        meta = AttentionMetadata.build(one.nums, one.contexts, one.tables, self.block_size, device)
        hidden = self.drafter.forward(torch.tensor(one.ids, device=device), self._cache, meta, one.states)
        if not one.ends:
            return None
        if one.ends != list(range(len(hidden))):
            hidden = hidden[meta.last_tokens[one.ends]]
        return EndStates(hidden, self.drafter.logits(hidden))
