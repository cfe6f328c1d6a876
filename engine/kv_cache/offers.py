"""The offers of an engine: which of its cache blocks have copies in memory that other engines read.

An offer stands under a lease: until it ends, or is given back, the copy is not overwritten. Afterwards it can be read
as long as no newer block takes its place. Bookkeeping by name only; `Move`s fill the slots. Pure: time is passed in.
"""

from collections import OrderedDict
from collections.abc import Iterable

from sluice_server.engine.kv_cache.prefix import is_of

LEASE_S = 10.0  # a hand-off takes one turn round the ring


class Offers:
    """The slots of one engine's shared memory, and the names of the blocks whose copies they hold."""

    def __init__(self, num_slots: int) -> None:
        self.num_offered = 0  # copies made since start
        self.num_refused = 0  # blocks that found every slot leased
        self._num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the first lease to end first
        self._until: dict[bytes, float] = {}  # when a lease ends
        self._free = list(range(num_slots - 1, -1, -1))
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_slots(self) -> int:
        """Number of copies that there is room for."""
        return self._num_slots

    def pass_time(self, now_s: float) -> None:
        """Sets the time. It never goes back."""
        self._now_s = max(self._now_s, now_s)

    def offer(self, name: bytes) -> int | None:
        """Begins a lease. Returns the slot that the block must be copied to; None if its copy is there already, or if
        every slot is leased."""
        slot = self._slot_of.pop(name, None)
        is_new = slot is None
        if slot is None:
            slot = self._take_slot()
        if slot is None:
            self.num_refused += 1
            return None
        self._slot_of[name] = slot
        self._until[name] = self._now_s + LEASE_S
        self.num_offered += is_new
        return slot if is_new else None

    def release(self, names: Iterable[bytes]) -> None:
        """Ends leases: their readers have what they wanted. Ignores names without an offer."""
        for name in names:
            if name in self._slot_of:
                self._until[name] = self._now_s
                self._slot_of.move_to_end(name, last=False)

    def withdraw(self, name: bytes) -> int | None:
        """Ends an offer. Returns the slot that must be cleared; None if there is no such offer."""
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            del self._until[name]
            self._free.append(slot)
        return slot

    def clear(self, owner: bytes) -> list[int]:
        """Ends the offers of an owner's blocks, or all for b"". Returns the slots that must be cleared."""
        slots = (self.withdraw(name) for name in list(self._slot_of) if is_of(name, owner))
        return [slot for slot in slots if slot is not None]

    def check(self) -> None:
        """Asserts that every slot is in exactly one place, and that leases are in the order of their ends."""
        slots = sorted([*self._slot_of.values(), *self._free])
        assert slots == list(range(self._num_slots)), "a shared slot is used twice or lost"
        assert self._until.keys() == self._slot_of.keys(), "a lease without an offer"
        ends = [max(self._until[name], self._now_s) for name in self._slot_of]
        assert ends == sorted(ends), "a lease ends before one that began earlier"

    def _take_slot(self) -> int | None:
        """Returns a free slot, or that of the lease that ended first."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slot_of), None)
        if oldest is None or self._until[oldest] > self._now_s:
            return None
        del self._until[oldest]
        return self._slot_of.pop(oldest)
