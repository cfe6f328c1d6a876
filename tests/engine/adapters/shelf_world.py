"""What a runner holds of adapters, for tests of the shelf that orders it."""

from collections import deque

from sluice_server.engine.adapters.entry import Order, OrderKind
from sluice_server.engine.adapters.shelf import Shelf


class World:
    """What a runner holds: contents by slot and in host memory. An order that cannot be carried out fails."""

    def __init__(self, shelf: Shelf, budget: int) -> None:
        self.shelf = shelf
        self.budget = budget
        self.sizes: dict[bytes, int] = {}
        self.slots: dict[int, bytes] = {}
        self.host: set[bytes] = set()
        self.under_way: deque[Order] = deque()

    def carry_out(self) -> None:
        for order in self.shelf.take_orders():
            if order.kind is OrderKind.FREE:
                assert self.slots.pop(order.slot) == order.digest, "a slot of another is freed"
                continue
            if order.kind is OrderKind.FORGET:
                self.host.remove(order.digest)
                assert all(one.digest != order.digest for one in self.under_way), "a source goes while it is read"
                continue
            if order.slot >= 0:
                assert order.kind is OrderKind.READ or order.digest in self.host, "a load has no source"
                assert order.slot not in self.slots, "a load overwrites a slot"
                assert all(one.slot != order.slot for one in self.under_way)
            self.under_way.append(order)
        used = [*self.slots.values(), *(one.digest for one in self.under_way if one.slot >= 0)]
        assert sum(self.sizes[digest] for digest in used) <= self.budget, "the device has more bytes than it may"

    def end(self, is_good: bool = True) -> None:
        order = self.under_way.popleft()
        if is_good and order.slot < 0:
            self.host.add(order.digest)
        elif is_good:
            self.slots[order.slot] = order.digest
        self.shelf.ended(order, is_good)

    def take(self, digest: bytes) -> int | None:
        slot = self.shelf.hold(digest) if self.shelf.is_ready(digest) else None
        assert slot is None or self.slots.get(slot) == digest, "a sequence computes with another adapter"
        return slot
