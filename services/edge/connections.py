"""Bounds the number of HTTP connections, and chooses which one to close when there are too many. No I/O, no clock.

A connection is idle while none of its requests is being answered. Idle connections are closed before a new one is
refused: those of the new connection's address if that has its full share, else those of the address with most
connections.
"""

import collections
import dataclasses
import ipaddress
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of connections.

    Attributes:
        most: connections at once.
        most_of_address: connections at once from one address (an IPv6 /64 network counts as one).
        head_s: seconds for the head of a request, from the connection's start or the head's first byte.
        body_s: seconds for the body after the head.
        write_s: seconds that a response may wait for a client that does not read.
        head_bytes: the most bytes of a head, and of the lines between two parts of a body in chunks.
    """

    most: int
    most_of_address: int
    head_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 60.0
    head_bytes: int = 16 << 10


class Connection(Protocol):
    """A connection that can be closed."""

    def close(self) -> None:
        """Close it at once."""


class Connections:
    """The open connections, by address. All methods take constant time, except that `opened` on a full server looks
    at each address once."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._group: dict[Connection, str] = {}
        self._number: collections.Counter[str] = collections.Counter()
        self._idle: dict[str, dict[Connection, None]] = {}  # by address, least recently active first

    def __len__(self) -> int:
        return len(self._group)

    def opened(self, connection: Connection, group: str) -> bool:
        """Add a new connection; close an idle one if there are too many. Returns False if the new one must be
        refused."""
        if self._number[group] >= self._bounds.most_of_address:
            if not self._cut(group):
                return False
        elif len(self._group) >= self._bounds.most and not self._cut(self._largest()):
            return False
        self._group[connection] = group
        self._number[group] += 1
        self.rests(connection)
        return True

    def works(self, connection: Connection) -> None:
        """Note that a request of the connection is being answered."""
        if connection in self._group:
            self._idle.get(self._group[connection], {}).pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """Note that the connection is idle, as the most recent one."""
        if connection in self._group:
            self._idle.setdefault(self._group[connection], {})[connection] = None

    def closed(self, connection: Connection) -> None:
        """Remove a connection that has ended; also called for one that was refused or closed here."""
        group = self._group.pop(connection, None)
        if group is None:
            return
        idle = self._idle.get(group, {})
        idle.pop(connection, None)
        self._number[group] -= 1
        if not self._number[group]:
            del self._number[group]
            self._idle.pop(group, None)

    def _cut(self, group: str) -> bool:
        oldest = next(iter(self._idle.get(group, ())), None)
        if oldest is None:
            return False
        self.closed(oldest)
        oldest.close()
        return True

    def _largest(self) -> str:
        """Returns the address with most connections, of those that have idle ones."""
        return max((group for group, idle in self._idle.items() if idle), key=self._number.__getitem__, default="")


def group_of(address: str) -> str:
    """Returns the key of an address: an IPv4 address, or an IPv6 /64 network, as one customer usually has a whole
    one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
