"""The part of a step that every rank of a group computes alike: layout, forward pass, moves within the cache.

Takes plans and block tables, and gives hidden states; sampling belongs to the runner.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.groups import LayerGroups, one_group
from sluice_server.engine.models.given import GivenRows
from sluice_server.engine.models.layers.sides import StepSides
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.worker.prefixes import SharedPrefixes
from sluice_server.engine.worker.sample_positions import SamplePositions
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.trees import Trees, tree_of

LEAST_SAVED_ON_CPU = 1024  # keys that need not be read again, below which nothing was gained
AcceptedMoves = list[tuple[int, int, int]]  # (slot, position, new position)


class HiddenStates(NamedTuple):
    """Hidden states of a step.

    Attributes:
        computed: [T, hidden] of all tokens of the step, or of those behind which something is sampled.
        sampled: [S, hidden] of the latter.
    """

    computed: Tensor
    sampled: Tensor


class ForwardPass:
    """Computes one model over one cache."""

    def __init__(
        self,
        model: Model,
        store: BlockStore,
        block_size: int,
        tables: "np.ndarray[Any, np.dtype[np.int32]]",
        groups: LayerGroups | None = None,
    ) -> None:
        """`tables`, int32 [groups, slots, blocks]: block tables, which their owner keeps up to date."""
        self._model = model
        self._store = store
        self._block_size = block_size
        self._tables = tables
        self._groups = groups or one_group(model.config.windows)
        self._cache = [store.cache[place] for place in self._groups.place_of]
        self._prefixes = [
            SharedPrefixes(table, block_size, LEAST_SAVED_ON_CPU) if model.device.type == "cpu" and not window else None
            for table, window in zip(tables, self._groups.windows, strict=True)
        ]

    def compute(
        self,
        plan: StepPlan,
        positions: SamplePositions,
        *,
        is_whole: bool,
        given: Sequence[GivenRows] = (),
        turned: Sequence[GivenRows] = (),
        sides: StepSides | None = None,
    ) -> HiddenStates:
        """Computes a plan's tokens and writes their keys and values.

        `is_whole`: all hidden states are needed. `given`: embeddings that take the place of those of ids. `sides`:
        products of adapters, for the rows with one. `turned`: positions in three directions, see `Model.forward`.
        """
        meta = self._layout(plan)
        ids = torch.from_numpy(np.array(plan.token_ids, dtype=np.int64)).to(self._model.device)
        at = self._places(plan, positions, meta)
        kept = None if is_whole or len(at) == plan.num_tokens else at
        hidden = self._model.forward(ids, meta.positions, self._cache, meta, kept, given, turned, sides)
        return HiddenStates(hidden, hidden if len(at) == len(hidden) else hidden[at])

    def move_accepted(self, moves: AcceptedMoves) -> None:
        """Moves the keys and values of accepted drafts to other positions of their slots."""
        slots, sources, targets = np.array(moves, dtype=np.int64).T
        tables, size = self._tables, self._block_size
        places = [(tables[:, slots, at // size] * np.int64(size) + at % size).ravel() for at in (sources, targets)]
        self._store.move_slots(*(torch.from_numpy(place).to(self._model.device) for place in places))

    def _layout(self, plan: StepPlan) -> AttentionMetadata:
        contexts = [start + num for start, num in zip(plan.starts, plan.query_lens, strict=True)]
        size, device, trees = self._block_size, self._model.device, trees_of(plan)
        first, *others = (
            AttentionMetadata.build(
                plan.query_lens,
                contexts,
                tables[plan.slots],
                size,
                device,
                trees,
                prefixes.of(plan) if prefixes else None,
                plan.wholes,
            )
            for tables, prefixes in zip(self._tables, self._prefixes, strict=True)
        )
        return first.with_groups((first, *others), self._groups.group_of) if others else first

    def _places(self, plan: StepPlan, positions: SamplePositions, meta: AttentionMetadata) -> Tensor:
        """Returns the indices of the step's tokens behind which something is sampled: int64, ascending."""
        if plan.drafts:
            return torch.tensor(positions.tokens, device=self._model.device)
        return meta.last_tokens if len(positions.rows) == len(plan.slots) else meta.last_tokens[positions.rows]


def trees_of(plan: StepPlan) -> Trees:
    """Returns the trees of the rows whose drafts branch, by row."""
    return {i: tree_of(plan.query_lens[i] - len(parents), parents) for i, parents in plan.parents.items()}
