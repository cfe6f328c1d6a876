"""The adapters of a rank other than 0: each rank reads an adapter's files itself, on a thread of its own.

Rank 0 says which slot gets which adapter before it says what to compute with it. A step waits for a read that has not
ended; one whose adapter could not be read, or is another than rank 0's, fails.
"""

from collections.abc import Mapping
from concurrent.futures import Future

from sluice_server.engine.adapters.loader import AdapterLoader, LoadedAdapter
from sluice_server.engine.models.layers.sides import AdapterProducts, HostSides
from sluice_server.engine.parallel.messages import FillSlot
from sluice_server.engine.worker.slots.adapters import host_sides


class RankAdapters:
    """What adapter slots hold on this rank."""

    on_device = False

    def __init__(self, loader: AdapterLoader) -> None:
        self.loader = loader
        self._slots: dict[int, tuple[FillSlot, Future[LoadedAdapter]]] = {}

    def fill(self, order: FillSlot) -> None:
        """Begins to read what a slot is to hold, or empties the slot."""
        self.loader.let_go([self._slots.pop(order.slot, None)])
        if order.path:
            self._slots[order.slot] = order, self.loader.read(order.path)

    def __getitem__(self, slot: int) -> AdapterProducts | None:
        """Returns what a slot holds, once it is read. Raises ServiceError if it could not be read, and ValueError if it
        is not what rank 0 has."""
        if slot not in self._slots:
            return None
        order, reading = self._slots[slot]
        loaded = reading.result()
        if loaded.digest != order.digest:
            raise ValueError(f"the adapter {order.path} of this rank has another digest than that of rank 0")
        assert isinstance(loaded.content, AdapterProducts), "ranks are on CPUs"
        return loaded.content

    def sides(self, rows: Mapping[int, list[int]], num_tokens: int) -> HostSides:
        """Returns the products beside a step; `rows`: those of each adapter slot. Raises what `[]` raises."""
        return host_sides(rows, self)
