"""The shelf of adapters: decides which of them are in device slots and host memory, and which come next.

    disk ──read──▶ host bytes ──load──▶ device slot        a device with memory of its own
    disk ──────────read──────────▶ slot                    a CPU, whose slots are in host memory

Bookkeeping by digest and bytes only: an adapter takes its own bytes, and nothing is padded to the largest. A runner
carries out the `Order`s in the order in which they were decided, and reports how reads and loads ended; it never waits
for one. Either tier evicts the least recently needed adapter that nothing runs with. Where adapters outnumber slots,
one that has waited for long gets the turn: no other is loaded until running sequences have left enough room for it.
Pure: no tensors, files, requests or clock.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from sluice_server.engine.adapters.entry import Copy, Entry, Order, OrderKind


class Shelf:
    """The books of all adapters of an engine."""

    def __init__(self, num_slots: int, device_bytes: int, host_bytes: int | None) -> None:
        """`host_bytes`: None where slots are in host memory, so that a read fills one."""
        self._num_slots = num_slots
        self._device_bytes = device_bytes
        self._host_bytes = host_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently needed first
        self._free = list(range(num_slots - 1, -1, -1))
        self._queue: Mapping[bytes, bool] = {}  # of the last look
        self._turn: bytes | None = None
        self._draining: set[bytes] = set()
        self._lost: list[bytes] = []
        self._orders: list[Order] = []

    def add(self, digest: bytes, num_bytes: int) -> None:
        """Adds an adapter that is on disk. Raises ValueError if there is never room for it beside those pinned."""
        known = self._entries.get(digest)
        if known is not None:
            known.is_leaving = False
            return
        self._check_room(num_bytes, {})
        self._entries[digest] = Entry(num_bytes)

    def pin(self, digest: bytes) -> None:
        """Has the adapter loaded and kept in its slot. Raises ValueError if others would never have room then."""
        self._check_room(0, {digest: True})
        self._entries[digest].is_pinned = True

    def unpin(self, digest: bytes) -> None:
        """Lets the adapter be evicted again."""
        self._entries[digest].is_pinned = False

    def remove(self, digest: bytes) -> None:
        """Drops the adapter as soon as nothing runs with it and no transfer of it is under way."""
        self._entries[digest].is_leaving = True
        self._drop_if_done(digest)

    def has(self, digest: bytes) -> bool:
        """Whether requests may name the adapter: it was added, and neither removed nor lost."""
        return digest in self._entries and not self._entries[digest].is_leaving

    def is_ready(self, digest: bytes) -> bool:
        """Returns whether a sequence may begin to run with the adapter."""
        entry = self._entries[digest]
        return entry.device is Copy.HERE and not entry.is_leaving and digest not in self._draining

    def drains(self, digest: bytes) -> bool:
        """Returns whether the slot is given up as soon as nothing runs with the adapter, since another has its turn."""
        return digest in self._draining

    def hold(self, digest: bytes) -> int:
        """Returns the slot of a loaded adapter for a sequence that begins to run, and counts it."""
        entry = self._entries[digest]
        assert entry.device is Copy.HERE, "a sequence begins to run with an adapter that is not loaded"
        entry.refs += 1
        entry.is_fresh = False
        self._entries.move_to_end(digest)
        return entry.slot

    def give(self, digest: bytes) -> None:
        """Counts a sequence that no longer runs with the adapter."""
        entry = self._entries[digest]
        assert entry.refs > 0, "an adapter is given back once more than taken"
        entry.refs -= 1
        self._drop_if_done(digest)

    def arrive(self, digest: bytes) -> bool:
        """Takes an adapter whose bytes were just read into host memory, if there is room; returns whether it is there.
        Where slots are in host memory, a load into one is ordered."""
        entry = self._entries[digest]
        if self._host_bytes is None:
            return entry.device is Copy.NONE and self._load(digest, entry, OrderKind.LOAD)
        if entry.host is Copy.NONE and self._in_host() + entry.num_bytes <= self._host_bytes:
            entry.host = Copy.HERE
            return True
        return False

    def look_over(self, queue: Mapping[bytes, bool]) -> None:
        """Orders what waiting sequences need, once a step: reads ahead, and loads where there is room.

        `queue`: the adapters of waiting sequences in the order of these, and whether the oldest has waited for long.
        """
        self._queue = queue
        self._update_turn()
        pinned = [digest for digest, entry in self._entries.items() if entry.is_pinned]
        has_host = has_device = True  # after the first that finds no room, only the one whose turn it is looks for some
        for digest in dict.fromkeys([*pinned, *queue]):
            entry = self._entries.get(digest)
            if entry is None or entry.is_leaving or entry.device is not Copy.NONE:
                continue
            has_turn = digest == self._turn
            kind = OrderKind.READ if self._host_bytes is None else OrderKind.LOAD
            if kind is OrderKind.LOAD and entry.host is Copy.NONE and (has_host or has_turn):
                has_host = self._read(digest, entry)
            elif (kind is OrderKind.READ or entry.host is Copy.HERE) and (
                (has_device and self._turn is None) or has_turn
            ):
                has_device = self._load(digest, entry, kind)

    @property
    def bounded_by(self) -> str:
        """The option that bounds the bytes of slots."""
        return "--adapter-host-bytes" if self._host_bytes is None else "--adapter-bytes"

    @property
    def slot_bytes(self) -> int:
        """Bytes of the adapters in device slots."""
        return self._on_device()

    @property
    def host_bytes(self) -> int:
        """Bytes of the adapters in host memory."""
        return self._in_host()

    @property
    def has_pins(self) -> bool:
        """Whether adapters are pinned, which are loaded although no sequence waits for them."""
        return any(one.is_pinned for one in self._entries.values())

    def refs(self) -> Counter[bytes]:
        """Returns the sequences that run with each adapter."""
        return Counter({digest: one.refs for digest, one in self._entries.items()})

    def entries(self) -> Mapping[bytes, Entry]:
        """Returns all adapters, also those that leave; not to be changed."""
        return self._entries

    def take_orders(self) -> list[Order]:
        """Returns the orders since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def take_lost(self) -> list[bytes]:
        """Returns the adapters whose source was found gone since the last call: requests that name them must fail."""
        lost, self._lost = self._lost, []
        return lost

    def ended(self, order: Order, is_good: bool) -> None:
        """Records the end of a READ or LOAD. After a failed read the adapter is gone; a failed load is tried again."""
        digest, entry = order.digest, self._entries[order.digest]
        if order.slot < 0:
            entry.host = Copy.HERE if is_good else Copy.NONE
        elif is_good:
            entry.device = Copy.HERE
        else:
            self._empty(entry)
        if order.kind is OrderKind.READ and not is_good:
            entry.is_leaving = True
            self._lost.append(digest)
        self._drop_if_done(digest)

    def check(self) -> None:
        """Asserts that every slot is in exactly one place, no budget is exceeded and no used copy is missing."""
        entries = self._entries.values()
        held = [one.slot for one in entries if one.device is not Copy.NONE]
        assert sorted([*held, *self._free]) == list(range(self._num_slots)), "a device slot is used twice or lost"
        assert self._on_device() <= self._device_bytes, "more on the device than the budget allows"
        assert self._in_host() <= (self._host_bytes or 0), "more in host memory than the budget allows"
        for one in entries:
            assert not one.refs or one.device is Copy.HERE, "a sequence runs with an adapter that is not loaded"
            has_source = self._host_bytes is None or one.host is Copy.HERE
            assert one.device is not Copy.COMING or has_source, "a load has lost its source"
        assert self._draining <= set(self._entries), "an adapter that is gone drains"

    def _check_room(self, num_bytes: int, pins: Mapping[bytes, bool]) -> None:
        """Raises ValueError unless each adapter, and one more of `num_bytes`, fits beside all that are pinned."""
        kept = [one.num_bytes for digest, one in self._entries.items() if one.is_pinned or digest in pins]
        others = [one.num_bytes for digest, one in self._entries.items() if not (one.is_pinned or digest in pins)]
        largest = max([num_bytes, *others])
        if sum(kept) + largest > self._device_bytes:
            text = f"{largest} bytes of an adapter and {sum(kept)} of those pinned exceed {self._device_bytes}"
            raise ValueError(text)
        if self._host_bytes is not None and max([largest, *kept]) > self._host_bytes:
            raise ValueError(f"{max([largest, *kept])} bytes of an adapter exceed {self._host_bytes} in host memory")
        if len(kept) + (largest > 0) > self._num_slots:
            raise ValueError(f"{len(kept)} pinned adapters leave none of {self._num_slots} slots to others")

    def _update_turn(self) -> None:
        """Ends a turn that was taken or is no longer wanted, and gives it to the first that has waited for long."""
        turn, queue = self._turn, self._queue
        if turn is not None and (turn not in queue or not self.has(turn) or self._is_coming(turn)):
            self._turn = None
            self._draining.clear()
        if self._turn is None:
            due = (one for one, is_late in queue.items() if is_late and self.has(one) and not self._is_coming(one))
            self._turn = next(due, None)

    def _is_coming(self, digest: bytes) -> bool:
        return self._entries[digest].device is not Copy.NONE

    def _read(self, digest: bytes, entry: Entry) -> bool:
        """Orders a read if host memory has room, or others give it; returns whether it did. Only the one whose turn it
        is displaces what waiting sequences need."""
        assert self._host_bytes is not None, "slots are host memory"
        queue, excess = self._queue, self._in_host() + entry.num_bytes - self._host_bytes
        leaving: list[bytes] = []
        for other in self._wanted_last():
            one = self._entries[other]
            if excess <= 0:
                break
            is_kept = one.device is Copy.COMING or other == self._turn or (other in queue and digest != self._turn)
            if one.host is Copy.HERE and not is_kept:
                leaving.append(other)
                excess -= one.num_bytes
        if excess > 0:
            return False
        for other in leaving:
            self._entries[other].host = Copy.NONE
            self._orders.append(Order(OrderKind.FORGET, other))
        entry.host = Copy.COMING
        self._entries.move_to_end(digest)
        self._orders.append(Order(OrderKind.READ, digest))
        return True

    def _load(self, digest: bytes, entry: Entry, kind: OrderKind) -> bool:
        """Orders that a slot be filled if there is one with room, or others give it; returns whether it did. In its
        turn, an adapter has others drain until so."""
        queue, excess = self._queue, self._on_device() + entry.num_bytes - self._device_bytes
        slots, has_turn = 1 - len(self._free), digest == self._turn
        leaving: list[bytes] = []
        for other in self._wanted_last():
            one = self._entries[other]
            if excess <= 0 and slots <= 0:
                break
            is_kept = one.is_pinned or (other in queue and (one.is_fresh or not has_turn))
            if one.device is not Copy.HERE or is_kept:
                continue
            if has_turn or one.is_idle:
                leaving.append(other)
                excess, slots = excess - one.num_bytes, slots - 1
        if excess > 0 or slots > 0:
            return False
        if not all(self._entries[other].is_idle for other in leaving):
            self._draining.update(leaving)
            return False
        for other in leaving:
            self._free_slot(other)
        entry.slot, entry.device, entry.is_fresh = self._free.pop(), Copy.COMING, True
        self._entries.move_to_end(digest)
        self._orders.append(Order(kind, digest, entry.slot))
        return True

    def _wanted_last(self) -> Iterator[bytes]:
        """Yields adapters in the order of eviction: those that drain, then those that nothing waits for, each from the
        least recently needed on."""
        rank = {digest: (digest not in self._draining, digest in self._queue) for digest in self._entries}
        return iter(sorted(self._entries, key=rank.__getitem__))

    def _on_device(self) -> int:
        return sum(one.num_bytes for one in self._entries.values() if one.device is not Copy.NONE)

    def _in_host(self) -> int:
        return sum(one.num_bytes for one in self._entries.values() if one.host is not Copy.NONE)

    def _empty(self, entry: Entry) -> None:
        self._free.append(entry.slot)
        entry.slot, entry.device = -1, Copy.NONE

    def _free_slot(self, digest: bytes) -> None:
        entry = self._entries[digest]
        self._orders.append(Order(OrderKind.FREE, digest, entry.slot))
        self._draining.discard(digest)
        self._empty(entry)

    def _drop_if_done(self, digest: bytes) -> None:
        """Drops an adapter that leaves once nothing runs with it and no transfer of it is under way."""
        entry = self._entries[digest]
        if not entry.is_leaving or entry.refs or Copy.COMING in (entry.host, entry.device):
            return
        if entry.device is Copy.HERE:
            self._free_slot(digest)
        if entry.host is Copy.HERE:
            self._orders.append(Order(OrderKind.FORGET, digest))
        self._draining.discard(digest)
        del self._entries[digest]
