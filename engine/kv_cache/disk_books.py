"""Which blocks are on disk, by name, least recently used first, and how much room they take. Pure.

Other processes may write to the same directory and remove from it. `listed` takes what is really there, from a look
that was begun with `begin_listing`; what this process has decided meanwhile stands.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sluice_server.engine.kv_cache.prefix import is_of


class Listed(NamedTuple):
    """A block that was found on disk: its name, the blocks' worth of room that it takes, and whether it was not used
    for too long."""

    name: bytes
    room: int = 1
    is_expired: bool = False


class DiskBooks:
    """The blocks on disk. `capacity`: how many there may be; 0: there is no disk."""

    def __init__(self, capacity: int, names: tuple[bytes, ...] = ()) -> None:
        """`names`: those that an earlier process left, oldest first."""
        self.capacity = capacity
        self._room_of: OrderedDict[bytes, int] = OrderedDict.fromkeys(names[-capacity:] if capacity else (), 1)
        self._used = len(self._room_of)
        self._changed: dict[bytes, bool] = {}  # since the listing under way began: whether the name is there

    def __len__(self) -> int:
        return len(self._room_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._room_of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._room_of)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another block."""
        return self._used >= self.capacity

    def touch(self, name: bytes) -> None:
        """Marks a name that is there as most recently used."""
        self._room_of.move_to_end(name)

    def add(self, name: bytes) -> None:
        """Adds a name that is not there, as most recently used."""
        self._room_of[name] = 1
        self._used += 1
        self._changed[name] = True

    def discard(self, name: bytes) -> None:
        """Removes a name, if it is there."""
        self._used -= self._room_of.pop(name, 0)
        self._changed[name] = False

    def pop(self, is_needed: Callable[[bytes], bool] = lambda name: False) -> bytes | None:
        """Removes the least recently used name that is not needed and returns it; None if all are."""
        oldest = next((name for name in self._room_of if not is_needed(name)), None)
        if oldest is not None:
            self.discard(oldest)
        return oldest

    def shrink(self) -> list[bytes]:
        """Removes what is beyond the capacity, the least recently used first; returns the names."""
        gone: list[bytes] = []
        while self._used > self.capacity:
            oldest = self.pop()
            assert oldest is not None, "room is taken by nothing"
            gone.append(oldest)
        return gone

    def clear(self, owner: bytes) -> int:
        """Removes the names of an owner, or all for b""; returns how many."""
        gone = [name for name in self._room_of if is_of(name, owner)]
        for name in gone:
            self.discard(name)
        return len(gone)

    def begin_listing(self) -> None:
        """Says that a look at the directory begins, behind all transfers that were decided so far."""
        self._changed = {}

    def listed(self, found: Iterable[Listed]) -> list[bytes]:
        """Takes what the look has found, oldest first. Returns the names to remove: expired, or too many."""
        changed, gone = self._changed, []
        self._room_of.clear()
        for one in found:
            if not changed.get(one.name, True):
                continue
            if one.is_expired and one.name not in changed:
                gone.append(one.name)
            else:
                self._room_of[one.name] = one.room
        for name, is_there in changed.items():
            if is_there:
                self._room_of[name] = self._room_of.pop(name, 1)
        self._used = sum(self._room_of.values())
        self._changed = dict.fromkeys(gone, False)
        return [*gone, *self.shrink()]

    def check(self) -> None:
        """Asserts that the books add up and the capacity is kept."""
        assert self._used == sum(self._room_of.values()) <= self.capacity, "more on disk than the budget allows"
