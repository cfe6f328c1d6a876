"""The adapter of each slot: which rows of a step are computed with which one.

Takes slots and plans, not requests.
"""

import itertools
from typing import Protocol

import torch

from sluice_server.engine.models.layers.sides import AdapterProducts, StepSides
from sluice_server.engine.plan import NO_ADAPTER, Placement, StepPlan


class AdapterSlots(Protocol):
    """What adapter slots hold."""

    def __getitem__(self, slot: int, /) -> AdapterProducts | None:
        """Returns what a slot holds."""


class SlotAdapters:
    """Adapters by slot, for the slots whose requests have one."""

    def __init__(self, loaded: AdapterSlots = ()) -> None:
        self._loaded = loaded
        self._adapters: dict[int, int] = {}

    def reset(self, placement: Placement) -> None:
        """Replaces that of the slot's former sequence."""
        self.put(placement.slot, placement.adapter)

    def put(self, slot: int, adapter: int) -> None:
        """Makes an adapter slot that of a slot's sequence."""
        self._adapters.pop(slot, None)
        if adapter != NO_ADAPTER:
            self._adapters[slot] = adapter

    def sides(self, plan: StepPlan) -> StepSides | None:
        """Returns the products beside the plan's rows; None for a plan of the base alone."""
        if not self._adapters:
            return None
        rows: dict[int, list[int]] = {}
        ends = itertools.accumulate(plan.query_lens)
        for slot, num, end in zip(plan.slots, plan.query_lens, ends, strict=True):
            adapter = self._adapters.get(slot, NO_ADAPTER)
            if adapter != NO_ADAPTER:
                rows.setdefault(adapter, []).extend(range(end - num, end))
        if not rows:
            return None
        return StepSides([(torch.tensor(own), self._products(adapter)) for adapter, own in rows.items()])

    def _products(self, adapter: int) -> AdapterProducts:
        products = self._loaded[adapter]
        assert products is not None, "a row is to be computed with an adapter that is not loaded"
        return products
