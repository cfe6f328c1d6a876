"""The tiers below the device: decides which blocks move to host memory and then to disk, and how they come back.

    device ──save──▶ host slots ──write──▶ disk
       ▲                │  ▲  ▲              │
       └────restore─────┘  │  └─────read─────┘
                         fetch
                           │
                  store of the host ◀── what is offered, of all its engines

Bookkeeping by name only. A runner carries out the `Move`s in the order in which they were decided, and reports how
reads and writes ended. A name whose bytes may be lost is not found, and its tokens are computed again. Every tier
evicts the least recently used block; the store, which is another process, does so by itself. Pure: no tensors, files or
requests.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from sluice_server.engine.kv_cache.disk_books import DiskBooks, Listed
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.prefix import is_of
from sluice_server.engine.kv_cache.store_books import StoreBooks


@dataclasses.dataclass(slots=True)
class TierStats:
    """Counts of blocks since start."""

    num_saved: int = 0
    num_restored: int = 0
    num_written: int = 0
    num_read: int = 0
    num_failed: int = 0  # failed reads and writes: the tokens are computed again
    num_fetched: int = 0
    num_missed: int = 0  # blocks that the store was believed to have, and did not give in time


class Tiers:
    """Host slots and disk files of one cache. The capacity of either may be 0."""

    def __init__(self, num_host: int, num_disk: int, on_disk: tuple[bytes, ...] = ()) -> None:
        """`on_disk`: names of the blocks that an earlier process left on disk, oldest first."""
        self.stats = TierStats()
        self.num_behind = 0  # device blocks that are being written to disk
        self.num_not_kept = 0  # of those that have ended since start, the failed ones
        self._num_host = num_host
        self._host: OrderedDict[bytes, int] = OrderedDict()  # name → slot, least recently used first
        self._free = list(range(num_host - 1, -1, -1))
        self._disk = DiskBooks(num_disk, on_disk)
        self._store = StoreBooks()
        self._reading: dict[bytes, int] = {}
        self._unwanted: set[bytes] = set()  # being read, and not to be used
        self._unwiped: set[int] = set()  # slots with bytes that are to go, once they are free
        self.num_clearing = 0  # owners whose files are being deleted
        self.num_not_cleared = 0  # of those that have ended since start, the failed ones

    @property
    def num_host(self) -> int:
        """Number of blocks in host memory."""
        return len(self._host)

    @property
    def num_disk(self) -> int:
        """Number of blocks on disk."""
        return len(self._disk)

    @property
    def num_disk_slots(self) -> int:
        """Number of blocks that the disk may hold."""
        return self._disk.capacity

    def save(self, name: bytes, block: int) -> list[Move]:
        """Returns the moves that save `block`, named `name`, before it is overwritten on the device. Empty if the name
        is there or being read, or no slot is free."""
        if name in self._host:
            self._host.move_to_end(name)
            return []
        if name in self._reading:
            return []
        moves, slot = self._take_slot()
        if slot is None:
            return []
        self._host[name] = slot
        self.stats.num_saved += 1
        return [*moves, Move(MoveKind.SAVE, block, slot)]

    @property
    def num_slots(self) -> int:
        """Number of blocks that host memory can hold."""
        return self._num_host

    def touch(self, name: bytes) -> bool:
        """Whether the name is in host memory; marks it as most recently used."""
        if name not in self._host:
            return False
        self._host.move_to_end(name)
        return True

    def restore(self, name: bytes, block: int) -> Move:
        """Returns the move that copies a block found by `touch` to a device block; it stays in host memory too."""
        self._host.move_to_end(name)
        self.stats.num_restored += 1
        return Move(MoveKind.RESTORE, self._host[name], block)

    def is_reading(self, name: bytes) -> bool:
        """Whether the name is being read from the store or from disk."""
        return name in self._reading

    def expect(self, names: Iterable[bytes]) -> None:
        """Notes that the store of the host has these: it is asked before the disk."""
        self._store.add(names)

    def read(self, name: bytes) -> list[Move] | None:
        """Returns the moves that read a name from the store, or else from disk, into host memory. None if neither has
        it, it is being read, or no slot is free."""
        is_stored = name in self._store
        if name in self._reading or not (is_stored or name in self._disk):
            return None
        if not is_stored:
            self._disk.touch(name)
        moves, slot = self._take_slot()
        if slot is None:
            return None
        self._reading[name] = slot
        return [*moves, Move(MoveKind.FETCH if is_stored else MoveKind.READ, target=slot, name=name)]

    def ended(self, move: Move, is_good: bool) -> None:
        """Records the end of a READ, FETCH, WRITE, KEEP or CLEAR; after a failure the name is removed."""
        if move.kind is MoveKind.CLEAR:
            self.num_clearing -= 1
            self.num_not_cleared += not is_good
        elif move.kind is MoveKind.FETCH:
            self.stats.num_fetched += is_good
            self.stats.num_missed += not is_good
            if not is_good:
                self._store.discard(move.name)
            self._has_read(move.name, is_good)
        else:
            self._disk_ended(move, is_good)

    def _disk_ended(self, move: Move, is_good: bool) -> None:
        if not is_good:
            self._disk.discard(move.name)
            self.stats.num_failed += 1
        if move.kind is MoveKind.READ:
            self.stats.num_read += self._has_read(move.name, is_good)
            return
        self.stats.num_written += is_good
        if move.kind is MoveKind.KEEP:
            self.num_behind -= 1
            self.num_not_kept += not is_good

    def _has_read(self, name: bytes, is_good: bool) -> bool:
        """Ends a read into a host slot; returns whether the name is there now."""
        slot, is_unwanted = self._reading.pop(name), name in self._unwanted
        self._unwanted.discard(name)
        if slot >= self._num_host:  # there are fewer slots since the read began
            return False
        if is_unwanted:
            self._unwiped.add(slot)
        if is_good and not is_unwanted:
            self._host[name] = slot
            return True
        self._free.append(slot)
        return False

    def keep(self, blocks: Sequence[tuple[bytes, int]]) -> list[Move]:
        """Returns the moves that bring the disk to what is worth keeping of all tiers: what leaves it, then what is
        written, most recently used first. `blocks`: name and number of those on the device, least recently used first.
        """
        found = {name: Move(MoveKind.WRITE, slot, name=name) for name, slot in self._host.items()}
        for name, block in blocks:
            in_host = found.pop(name, None)
            found[name] = in_host or Move(MoveKind.KEEP, block, name=name)
        written = []
        capacity = self._disk.capacity
        for name, move in list(found.items())[-capacity:] if capacity else ():
            if name in self._disk:
                self._disk.touch(name)
            else:
                self._disk.add(name)
                written.append(move)
        return [*_removals(self._disk.shrink()), *reversed(written)]

    def clear(self, owner: bytes) -> tuple[int, list[Move]]:
        """Forgets the blocks of an owner, or all for b"", and has their bytes wiped: those of free slots, too, as
        nobody knows whose they were. Returns how many names are gone, and the moves that delete them from disk."""
        gone = {name for name in self._host if is_of(name, owner)}
        self._free += [self._host.pop(name) for name in gone]
        self._unwanted |= {name for name in self._reading if is_of(name, owner)}
        self._unwiped |= set(self._free)
        self._store.clear(owner)
        num = len(gone) + self._disk.clear(owner)
        if not self._disk.capacity:
            return num, []
        self.num_clearing += 1
        return num, [Move(MoveKind.CLEAR, name=owner)]

    def wipe(self, limit: int) -> list[Move]:
        """Returns the moves that wipe up to `limit` slots of what was cleared."""
        slots = [slot for slot in self._free if slot in self._unwiped][:limit] if self._unwiped else []
        self._unwiped -= set(slots)
        return [Move(MoveKind.WIPE_SLOT, target=slot) for slot in slots]

    @property
    def num_unwiped(self) -> int:
        """Number of slots that are still to be wiped."""
        return len(self._unwiped)

    def begin_listing(self) -> None:
        """Says that a look at the directory of the disk begins, behind all moves that were decided so far."""
        self._disk.begin_listing()

    def listed(self, found: Iterable[Listed]) -> list[Move]:
        """Takes what the look has found, oldest first; returns the moves that remove what is too old or too much."""
        return _removals(self._disk.listed(found))

    def is_on_disk(self, name: bytes) -> bool:
        """Whether the name is on disk, or about to be."""
        return name in self._disk

    def can_bring(self, name: bytes) -> bool:
        """Whether the name is in host memory, or in the store as far as is known."""
        return name in self._host or name in self._store

    def is_in_host(self, name: bytes) -> bool:
        """Whether the name is in host memory."""
        return name in self._host

    def make_room(self, is_needed: Callable[[bytes], bool]) -> list[Move] | None:
        """Returns the moves that make room on disk for one block: none if there is, else the oldest that is not needed
        goes. None if all are needed."""
        if not self._disk.is_full:
            return []
        oldest = self._disk.pop(lambda name: is_needed(name) or name in self._reading)
        return None if oldest is None else _removals([oldest])

    def write(self, name: bytes, block: int) -> Move:
        """Returns the move that writes a device block to disk, for which there is room."""
        self._disk.add(name)
        self.num_behind += 1
        return Move(MoveKind.KEEP, block, name=name)

    @property
    def host_names(self) -> tuple[bytes, ...]:
        """Names of the blocks in host memory, least recently used first."""
        return tuple(self._host)

    @property
    def disk_names(self) -> tuple[bytes, ...]:
        """Names of the blocks on disk, least recently used first."""
        return tuple(self._disk)

    def resize(self, num_host: int) -> list[Move]:
        """Sets the number of host slots: the first ones. Returns the moves that bring the contents of others to disk.
        Those that are being read into are given up when their read ends."""
        before, self._num_host = self._num_host, num_host
        moves: list[Move] = []
        for name in [name for name, slot in self._host.items() if slot >= num_host]:
            moves += self._to_disk(name, self._host.pop(name))
        self._free = [slot for slot in self._free if slot < num_host]
        self._unwiped = {slot for slot in self._unwiped if slot < num_host}  # memory that is given back is gone
        reading = set(self._reading.values())
        self._free += [slot for slot in range(num_host - 1, before - 1, -1) if slot not in reading]
        return moves

    def check(self) -> None:
        """Asserts that every slot is in exactly one place and no budget is exceeded."""
        slots = [*self._host.values(), *self._reading.values(), *self._free]
        assert sorted(slot for slot in slots if slot < self._num_host) == list(range(self._num_host)), (
            "a host slot is used twice or lost"
        )
        assert {slot for slot in slots if slot >= self._num_host} <= set(self._reading.values()), "a slot is not there"
        self._disk.check()
        assert self._unwiped <= set(slots) and self._unwanted <= self._reading.keys(), "what is to go is not there"

    def _take_slot(self) -> tuple[list[Move], int | None]:
        """Returns a host slot, and the moves that empty it first; the slot is None when all are being read into."""
        if self._free:
            slot = self._free.pop()
            self._unwiped.discard(slot)  # it is overwritten as a whole
            return [], slot
        if not self._host:
            return [], None
        name, slot = self._host.popitem(last=False)
        return self._to_disk(name, slot), slot

    def _to_disk(self, name: bytes, slot: int) -> list[Move]:
        if not self._disk.capacity:
            return []
        if name in self._disk:
            self._disk.touch(name)
            return []
        self._disk.add(name)
        return [*_removals(self._disk.shrink()), Move(MoveKind.WRITE, slot, name=name)]


def _removals(names: Iterable[bytes]) -> list[Move]:
    return [Move(MoveKind.REMOVE, name=name) for name in names]
