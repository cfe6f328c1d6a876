"""The adapter slots of a device with memory of its own.

An adapter is copied there beside the steps, on a queue of its own that no step waits for; its slot is full once the
copy has arrived. All else is ordered with the steps: the tables that tell where a slot's matrices are, and the moves
that close gaps, which wait for copies under way.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sluice_server.engine.adapters.images import AdapterImage
from sluice_server.engine.adapters.regions import Region, Regions
from sluice_server.engine.models.layers.device_sides import DeviceSides, DeviceTables
from sluice_server.engine.worker.device import Copies, Device
from sluice_server.kernels.reference.low_rank import PLACES

MOVED_AT_ONCE = 1 << 21  # elements
BEGINS = [0, *range(4, PLACES, 3)]  # among the numbers of a product: where a begins, and each projection's b


class Filling(NamedTuple):
    """A slot that is being filled; `then` is called when it is."""

    slot: int
    image: AdapterImage
    then: Callable[[], None]


class DeviceSlots:
    """What is in adapter slots on a device."""

    on_device = True

    def __init__(self, tables: DeviceTables, device: Device, copies: Copies) -> None:
        self.tables = tables
        self._device = device
        self._copies = copies
        self._regions = Regions(len(tables.memory))
        self._images: dict[int, AdapterImage] = {}  # by slot
        self._waiting: deque[Filling] = deque()  # for copies under way, as gaps have to be closed
        self._arriving: list[tuple[Filling, Callable[[], bool]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether slots are being filled."""
        return bool(self._arriving or self._waiting)

    def __getitem__(self, slot: int) -> AdapterImage | None:
        """Returns what a slot holds, or will."""
        return self._images.get(slot)

    def fill(self, slot: int, image: AdapterImage, then: Callable[[], None]) -> None:
        """Begins to fill a slot; `then` is called by `settle`."""
        self._images[slot] = image
        self._waiting.append(Filling(slot, image, then))
        self._begin()

    def empty(self, slot: int) -> AdapterImage:
        """Empties a slot; returns what it held. Steps begun before may still read its memory: what comes there next
        is behind them."""
        assert all(slot != one.slot for one, _ in self._arriving), "a slot is emptied while it is filled"
        self._regions.give(slot)
        return self._images.pop(slot)

    def settle(self) -> None:
        """Notes the slots whose copies have arrived, and begins what has waited for that."""
        arriving, self._arriving = self._arriving, []
        for filling, has_arrived in arriving:
            if has_arrived():
                filling.then()
            else:
                self._arriving.append((filling, has_arrived))
        self._begin()

    def sides(self, rows: Mapping[int, list[int]], num_tokens: int) -> DeviceSides:
        """Returns the products beside a step of so many tokens. `rows`: its rows by adapter slot."""
        owners = np.full(num_tokens, self.tables.no_slot, dtype=np.int64)
        for slot, own in rows.items():
            owners[own] = slot
        return self.tables.sides(self._device.upload(owners))

    def _begin(self) -> None:
        while self._waiting:
            slot, image, _ = self._waiting[0]
            region = self._regions.take(slot, len(image.memory))
            if region is None and self._arriving:
                return
            if region is None:
                self._close_gaps()
                region = self._regions.take(slot, len(image.memory))
                assert region is not None, "more adapters are to be on the device than its memory holds"
            filling = self._waiting.popleft()
            self._tell(slot, region)
            self._arriving.append((filling, self._copies.begin(self._memory(region), image.memory)))

    def _close_gaps(self) -> None:
        for slot, before, after in self._regions.close_gaps():
            source, target = self._memory(before), self._memory(after)
            for part, to in zip(source.split(MOVED_AT_ONCE), target.split(MOVED_AT_ONCE), strict=True):
                to.copy_(part.clone())  # they may overlap
            self._tell(slot, after)

    def _memory(self, region: Region) -> Tensor:
        return self.tables.memory[region.first : region.first + region.size]

    def _tell(self, slot: int, region: Region) -> None:
        """Begins to write where a slot's matrices are."""
        image, tables = self._images[slot], self.tables
        places = image.places.clone()
        places[..., BEGINS] += region.first
        tables.places[slot].copy_(self._device.upload(places.numpy()))
        tables.scales[slot].copy_(self._device.upload(image.scales.numpy()))
