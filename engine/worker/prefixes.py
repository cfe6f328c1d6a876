"""Finds the rows of a step that share a prefix in the cache.

Takes the slots of a step and the block tables of the host. Searches only when other rows run, not at each step.
"""

import sys

import numpy as np

from sluice_server.engine.plan import StepPlan
from sluice_server.kernels.layout.prefixes import LEAST_SAVED, PrefixGroups, shared_prefixes
from sluice_server.kernels.layout.ragged import Tables


class SharedPrefixes:
    """Finds shared prefixes of slots in their block tables, int32 [slots, blocks], which the owner keeps up to date."""

    def __init__(self, tables: Tables, block_size: int, least_saved: int = LEAST_SAVED) -> None:
        self._tables = tables
        self._block_size = block_size
        self._least_saved = least_saved
        self._slots: list[int] = []  # slots of the last search
        self._found: PrefixGroups | None = None

    def forget(self) -> None:
        """Drops the last result, as a slot has a new sequence."""
        self._slots = []

    def of(self, plan: StepPlan) -> PrefixGroups | None:
        """Returns the groups among the rows of one token, which come first in a plan."""
        if plan.placements or self._rewrites(plan):
            self.forget()
        num = next((i for i, count in enumerate(plan.query_lens) if count > 1), len(plan.query_lens))
        return self.find(plan.slots[:num], plan.starts[:num]) if num > 1 else None

    def _rewrites(self, plan: StepPlan) -> bool:
        """Returns whether a plan changes blocks that hold tokens already, as where a beam goes on from another."""
        starts = dict(zip(plan.slots, plan.starts, strict=True)) if plan.new_blocks else {}
        return any(run.first * self._block_size < starts.get(run.slot, sys.maxsize) for run in plan.new_blocks)

    def find(self, slots: list[int], starts: list[int]) -> PrefixGroups | None:
        """Returns the groups of rows that share prefixes; the rows compute one token each, at positions `starts`.

        The groups stay valid as long as the same slots run: blocks are only appended.
        """
        if self._slots != slots:
            at = np.array(starts, dtype=np.int64)
            self._found = shared_prefixes(self._tables[slots], at, self._block_size, self._least_saved)
            self._slots = list(slots)
        return self._found
