"""The adapter of each slot: which rows of a step are computed with which one.

Takes slots and plans, not requests.
"""

import itertools
from collections.abc import Mapping
from typing import Protocol

import torch

from sluice_server.engine.models.layers.sides import AdapterProducts, HostSides, StepSides
from sluice_server.engine.plan import NO_ADAPTER, Placement, StepPlan


class AdapterSlots(Protocol):
    """What adapter slots hold."""

    @property
    def on_device(self) -> bool:
        """Whether they are in a device's memory, where a recorded step finds the adapters of its rows itself."""

    def sides(self, rows: Mapping[int, list[int]], num_tokens: int) -> StepSides:
        """Returns the products beside a step of so many tokens; `rows`: those of each adapter slot, ascending."""


class FilledSlots(Protocol):
    """Slots in host memory."""

    def __getitem__(self, slot: int, /) -> AdapterProducts | None:
        """Returns what a slot holds."""


class NoSlots:
    """The slots of a runner whose requests name no adapter."""

    on_device = False

    def sides(self, rows: Mapping[int, list[int]], num_tokens: int) -> StepSides:
        """Is not called: no row has an adapter."""
        raise AssertionError("a row is to be computed with an adapter where there are none")


NO_SLOTS = NoSlots()


class SlotAdapters:
    """Adapters by slot, for the slots whose requests have one."""

    def __init__(self, loaded: AdapterSlots = NO_SLOTS) -> None:
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

    def are_in(self, plan: StepPlan) -> bool:
        """Returns whether some row of a plan has an adapter."""
        return bool(self._adapters) and not self._adapters.keys().isdisjoint(plan.slots)

    def are_of_host(self, plan: StepPlan) -> bool:
        """Returns whether some row of a plan has an adapter that only the host knows of."""
        return not self._loaded.on_device and self.are_in(plan)

    def sides(self, plan: StepPlan) -> StepSides | None:
        """Returns the products beside the plan's rows; None for a plan of the base alone."""
        if not self.are_in(plan):
            return None
        rows: dict[int, list[int]] = {}
        ends = itertools.accumulate(plan.query_lens)
        for slot, num, end in zip(plan.slots, plan.query_lens, ends, strict=True):
            adapter = self._adapters.get(slot, NO_ADAPTER)
            if adapter != NO_ADAPTER:
                rows.setdefault(adapter, []).extend(range(end - num, end))
        return self._loaded.sides(rows, plan.num_tokens)


def host_sides(rows: Mapping[int, list[int]], loaded: FilledSlots) -> HostSides:
    """Returns the products of adapters in host memory; `rows`: those of each slot."""
    groups = list[tuple[torch.Tensor, AdapterProducts]]()
    for adapter, own in rows.items():
        products = loaded[adapter]
        assert products is not None, "a row is to be computed with an adapter that is not loaded"
        groups.append((torch.tensor(own), products))
    return HostSides(groups)
