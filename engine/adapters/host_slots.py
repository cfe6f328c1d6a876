"""The adapter slots of a CPU: places in a table, as it computes with adapters where they lie in host memory."""

from collections.abc import Callable, Iterator, Mapping

from sluice_server.engine.models.layers.sides import AdapterProducts, HostSides
from sluice_server.engine.worker.slots.adapters import host_sides


class HostSlots:
    """What is in adapter slots."""

    on_device = False
    is_busy = False

    def __init__(self, num: int) -> None:
        self._slots: list[AdapterProducts | None] = [None] * num

    def __getitem__(self, slot: int) -> AdapterProducts | None:
        """Returns what a slot holds."""
        return self._slots[slot]

    def __iter__(self) -> Iterator[AdapterProducts | None]:
        return iter(self._slots)

    def fill(self, slot: int, content: AdapterProducts, then: Callable[[], None]) -> None:
        """Fills a slot and calls `then`."""
        self._slots[slot] = content
        then()

    def empty(self, slot: int) -> AdapterProducts | None:
        """Empties a slot; returns what it held."""
        content, self._slots[slot] = self._slots[slot], None
        return content

    def settle(self) -> None:
        """Does nothing: slots are filled at once."""

    def sides(self, rows: Mapping[int, list[int]], num_tokens: int) -> HostSides:
        """Returns the products beside a step. `rows`: its rows by adapter slot."""
        return host_sides(rows, self)
