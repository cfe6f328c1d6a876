"""Which blocks the store of the host is believed to have, by name. Pure.

Other processes fill and empty the store, and it may end at any time: a read finds out, and costs its deadline at most.
So the books are no more than what was heard last, and what they are too small for is computed.
"""

from collections import OrderedDict
from collections.abc import Iterable

from sluice_server.engine.kv_cache.prefix import is_of

MOST = 1 << 16  # names


class StoreBooks:
    """The names, what was heard of longest ago first."""

    def __init__(self, most: int = MOST) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def add(self, names: Iterable[bytes]) -> None:
        """Notes that the store has these."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def discard(self, name: bytes) -> None:
        """Notes that the store does not have this one."""
        self._names.pop(name, None)

    def clear(self, owner: bytes) -> None:
        """Forgets the names of an owner, or all for b""."""
        for name in [name for name in self._names if is_of(name, owner)]:
            del self._names[name]
